"""Kernels between a layer's matrix products, each with its PyTorch reference."""
