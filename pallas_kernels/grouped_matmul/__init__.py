"""Rows times the matrix of their group, for mixtures of experts: one kernel, through Triton."""
