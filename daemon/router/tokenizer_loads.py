"""What each tokenizer has been given: prompts and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from daemon.router.generation import Generation
from daemon.router.placement import choose
from transport.ids import ProcessName, RequestId
from transport.prompt_turns import LONG_PROMPT_BYTES

MAX_LONG_BYTES: Final = 32 << 20
"""Bytes of long prompts that one tokenizer holds at a time, a larger prompt alone. Further ones stay here."""
MAX_SHORT_BYTES: Final = 32 << 20
"""The same of short ones. Only a tokenizer that does not answer holds so many."""


class _Held:
    """Sizes of the prompts that one tokenizer may hold."""

    def __init__(self) -> None:
        self._sizes: dict[RequestId, int] = {}
        self.short_bytes = 0
        self.long_bytes = 0

    def add(self, request_id: RequestId, size: int) -> None:
        self.drop(request_id)
        self._sizes[request_id] = size
        self._count(size, 1)

    def drop(self, request_id: RequestId) -> None:
        size = self._sizes.pop(request_id, None)
        if size is not None:
            self._count(size, -1)

    def has_room(self, size: int) -> bool:
        if size <= LONG_PROMPT_BYTES:
            return self.short_bytes + size <= MAX_SHORT_BYTES
        return not self.long_bytes or self.long_bytes + size <= MAX_LONG_BYTES

    def _count(self, size: int, sign: int) -> None:
        if size <= LONG_PROMPT_BYTES:
            self.short_bytes += sign * size
        else:
            self.long_bytes += sign * size


class TokenizerLoads:
    """Owned by the router's core. Bytes count until the tokenizer has answered, also for what was
    cancelled: until then it may hold them."""

    def __init__(self) -> None:
        self.prompts: dict[ProcessName, int] = {}
        """Live prompts at each."""
        self._held: dict[ProcessName, _Held] = {}

    def joined(self, name: ProcessName) -> None:
        """A tokenizer takes prompts from now on. It may say so twice."""
        self.prompts.setdefault(name, 0)
        self._held.setdefault(name, _Held())

    def lost(self, name: ProcessName) -> None:
        del self.prompts[name], self._held[name]

    def choose(
        self, generation: Generation, takes: Callable[[ProcessName], bool]
    ) -> ProcessName | None:
        """A tokenizer that has room for the prompt and `takes` it; None: there is none now."""
        size = generation.prompt_bytes
        places = {
            name: count
            for name, count in self.prompts.items()
            if takes(name) and self._held[name].has_room(size)
        }
        return choose(generation.message.affinity, places)[0] if places else None

    def give(self, name: ProcessName, generation: Generation) -> None:
        self.prompts[name] += 1
        self._held[name].add(generation.request_id, generation.prompt_bytes)

    def take_back(self, name: ProcessName) -> None:
        """A prompt is live there no longer."""
        if name in self.prompts:
            self.prompts[name] -= 1

    def answered(self, name: ProcessName, request_id: RequestId) -> None:
        if name in self._held:
            self._held[name].drop(request_id)
