"""The router: one process per instance that owns the life of every request."""
