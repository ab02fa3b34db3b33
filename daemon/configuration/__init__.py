"""Every option once, and where its value comes from."""
