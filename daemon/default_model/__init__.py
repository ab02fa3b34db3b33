"""The model that is served when none is named."""
