"""The memory of a host pool: a self-describing segment of page rows and state rows."""
