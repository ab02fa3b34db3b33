"""HTTP below the API: limits, bodies, streams, keys, the log."""
