"""What each tokenizer has been given: prompts, and bytes of long ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from daemon.router.generation import Generation
from daemon.router.placement import choose
from transport.ids import ProcessName, RequestId
from transport.prompt_turns import LONG_PROMPT_BYTES

MAX_LONG_BYTES: Final = 32 << 20
"""Bytes of long prompts that one tokenizer holds at a time, a larger prompt alone. Further ones stay here."""


class TokenizerLoads:
    """Owned by the router's core. Bytes count until the tokenizer has answered, also for what was
    cancelled: until then it may hold them."""

    def __init__(self) -> None:
        self.prompts: dict[ProcessName, int] = {}
        """Live prompts at each."""
        self._long_bytes: dict[ProcessName, dict[RequestId, int]] = {}

    def joined(self, name: ProcessName) -> None:
        """A tokenizer takes prompts from now on. It may say so twice."""
        self.prompts.setdefault(name, 0)
        self._long_bytes.setdefault(name, {})

    def lost(self, name: ProcessName) -> None:
        del self.prompts[name], self._long_bytes[name]

    def long_bytes(self, name: ProcessName) -> int:
        return sum(self._long_bytes[name].values())

    def choose(
        self, generation: Generation, takes: Callable[[ProcessName], bool]
    ) -> ProcessName | None:
        """A tokenizer that has room for the prompt and `takes` it; None: there is none now."""
        size = generation.prompt_bytes
        places = {
            name: count
            for name, count in self.prompts.items()
            if takes(name) and self._has_room(name, size)
        }
        return choose(generation.message.affinity, places)[0] if places else None

    def give(self, name: ProcessName, generation: Generation) -> None:
        self.prompts[name] += 1
        if generation.prompt_bytes > LONG_PROMPT_BYTES:
            self._long_bytes[name][generation.request_id] = generation.prompt_bytes

    def take_back(self, name: ProcessName) -> None:
        """A prompt is live there no longer."""
        if name in self.prompts:
            self.prompts[name] -= 1

    def answered(self, name: ProcessName, request_id: RequestId) -> None:
        if name in self._long_bytes:
            self._long_bytes[name].pop(request_id, None)

    def _has_room(self, name: ProcessName, size: int) -> bool:
        held = self.long_bytes(name)
        return size <= LONG_PROMPT_BYTES or not held or held + size <= MAX_LONG_BYTES
