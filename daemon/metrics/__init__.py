"""The Prometheus exposition and its catalog."""
