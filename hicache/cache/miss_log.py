"""The last lookups that loaded less than they might have, for people who ask why. Not those of prompts
that are too short for any hit: they would fill the list and tell nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from hicache.cache.outcomes import MissReason
from hicache.cache.stats import MissRecord

_KEPT: Final = 64


class _NotedMiss(NamedTuple):
    stamp: int
    request_id: str
    prompt_tokens: int
    hit_tokens: int
    matched_tokens: int
    reason: MissReason


class MissLog:
    """Keeps the newest."""

    def __init__(self) -> None:
        self._misses: deque[_NotedMiss] = deque(maxlen=_KEPT)

    def note(
        self,
        stamp: int,
        request_id: str,
        *,
        prompt_tokens: int,
        hit_tokens: int,
        matched_tokens: int,
        reason: MissReason,
    ) -> None:
        """Keep one, of the time `stamp`."""
        self._misses.append(
            _NotedMiss(stamp, request_id, prompt_tokens, hit_tokens, matched_tokens, reason)
        )

    def records(self, seconds_since: Callable[[int], float]) -> list[MissRecord]:
        """All that are kept, newest first; `seconds_since` tells the age of a stamp."""
        return [
            MissRecord(
                seconds_ago=seconds_since(miss.stamp),
                prompt_tokens=miss.prompt_tokens,
                hit_tokens=miss.hit_tokens,
                matched_tokens=miss.matched_tokens,
                reason=miss.reason,
                request_id=miss.request_id,
            )
            for miss in reversed(self._misses)
        ]
