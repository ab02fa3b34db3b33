"""Attention kernels for NVIDIA GPUs, in Triton. Nothing outside imports this package without a GPU."""
