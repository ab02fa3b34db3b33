"""N-gram embeddings, looked up in large tables."""
