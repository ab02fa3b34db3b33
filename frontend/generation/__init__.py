"""From a request to its tokens, texts and ends."""
