"""Token counts of a request. Counted from ids, never from text."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; prompts with several choices count once."""

    prompt: int
    cached: int
    completion: int
