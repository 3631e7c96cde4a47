"""Sparse multi-head latent attention: every query row attends to the keys that its own indices name."""
