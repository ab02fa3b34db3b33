"""HTTP: the OpenAI-compatible API, its validation and streams, and the tokenizer pool."""
