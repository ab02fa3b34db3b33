"""From JSON objects to checked requests; every refusal names the field."""
