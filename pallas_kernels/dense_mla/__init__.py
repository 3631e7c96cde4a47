"""Expanded attention of rows over a range of keys each: one kernel, through Triton."""
