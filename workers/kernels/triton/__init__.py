"""Triton kernels. Imported on a GPU only."""
