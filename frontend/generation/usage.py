"""Token counts of a request, as the API reports them. Counted from ids, never from text."""

from __future__ import annotations

import msgspec

from frontend.http.json_body import JsonObject


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; prompts with several choices count once."""

    prompt: int
    cached: int
    completion: int

    def as_json(self) -> JsonObject:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
