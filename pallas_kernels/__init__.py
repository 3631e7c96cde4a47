"""GPU kernels for DeepSeek Sparse Attention and their tuning: arrays in, arrays out, nothing of models."""
