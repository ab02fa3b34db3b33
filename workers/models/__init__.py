"""Model implementations of our own, one package a model."""
