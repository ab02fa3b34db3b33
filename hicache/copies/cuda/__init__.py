"""Copies between a GPU and page-locked memory."""
