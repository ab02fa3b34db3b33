"""Hugging Face models, run unmodified over the page pool."""
