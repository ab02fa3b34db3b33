"""A frontend's lines to the router and to the daemon."""
