"""Measurements: every kernel checked first, then timed against the floor of the machine."""
