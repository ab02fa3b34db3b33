"""Attention over the page pool."""
