"""The Prometheus exposition."""
