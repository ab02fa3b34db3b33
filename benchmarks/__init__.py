"""What performance claims rest on. Each script prints a table and can write JSON."""
