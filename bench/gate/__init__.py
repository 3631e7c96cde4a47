"""Compiling the kernels for devices that are not there: what `python -m bench targets` is made of."""
