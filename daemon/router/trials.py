"""Finding the request that kills the processes it is given to.

Whatever shared a lost process is suspected. A process is given one suspect at a time, beside requests
that are beyond suspicion. If it is lost too, that suspect did it, and the others move on uncharged. A
suspect that gets on with its work is cleared. So a killer is given up after the second process, and
what shared a process with it is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from daemon.router.generation import Generation
from transport.ids import ProcessName

TOKENS_TO_CLEAR: Final = 4
"""More than were computed, but not yet told of, when the process was lost."""


class Trials:
    """Owned by the router's core."""

    def __init__(self, max_losses: int) -> None:
        """`max_losses`: how many processes a request may have killed before it is given up."""
        self._max_losses = max_losses
        self._suspects: dict[ProcessName, Generation] = {}

    def takes(self, process: ProcessName, generation: Generation) -> bool:
        """Whether the process may be given it now."""
        return not generation.losses or generation.is_paused or process not in self._suspects

    def begin(self, process: ProcessName, generation: Generation) -> None:
        if generation.losses and not generation.is_paused:
            self._suspects[process] = generation
            generation.tokens_on_trial = 0

    def end(self, process: ProcessName, generation: Generation) -> bool:
        """The process is not given it any longer, or proves nothing. Whether it was on trial there."""
        if self._suspects.get(process) is not generation:
            return False
        del self._suspects[process]
        return True

    def process_lost(self, process: ProcessName, sharing: Sequence[Generation]) -> list[Generation]:
        """Charge who may have killed the process; returns those to be given up."""
        suspect = self._suspects.pop(process, None)
        charged = sharing if suspect is None else [suspect]
        for generation in charged:
            generation.losses += 1
        return [generation for generation in charged if generation.losses > self._max_losses]
