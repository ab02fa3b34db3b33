"""How pages, states and records are laid out."""
