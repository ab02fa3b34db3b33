"""One choice of one request while a worker has it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from hicache.manager.ticket import PrefixTicket
from transport.framing import TokenArray
from transport.ids import ProcessName, RequestId
from transport.messages.generate import Generate, SamplingParams

SequenceKey = tuple[RequestId, int]
"""Request and choice index."""


class Status(enum.Enum):
    WAITING = "waiting"
    """The prompt, or what must be recomputed, is not fully computed yet."""
    RESERVED = "reserved"
    """Its prompt is computed elsewhere. It holds a slot and pages for what will arrive."""
    RUNNING = "running"
    """Decoding."""
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Tokens, resources and progress of one choice. Owned by the scheduler.

    ```
    tokens   |<------ prompt_len ------>|<-- generated -->|
    computed |<--- num_computed (KV in the pool, launched steps included) --->|
    ```
    While decoding, num_computed = len(tokens) + in_flight - 1: the last token's KV is computed by the
    step that samples its successor.
    """

    key: SequenceKey
    frontend: ProcessName
    prompt: TokenArray
    """Tokens from the client and, after a migration, those generated elsewhere."""
    prompt_len: int
    generate: Generate
    seed: int
    arrival: float = 0.0
    status: Status = Status.WAITING
    paused: bool = False
    """Its client does not read what was sent."""
    reported: bool = False
    """Whether `started` has gone out."""
    generated: list[int] = field(default_factory=list)
    """Tokens collected here."""
    num_computed: int = 0
    in_flight: int = 0
    """Tokens that launched steps sample and that are not collected yet."""
    epoch: int = 0
    """Grows when launched work of this sequence becomes void: preemption, finish."""
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    """Its block table."""
    engine_pages: int = 0
    """How many of them the engine was told of; 0: it does not know the sequence."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end it once it has `min_tokens`; set by the scheduler."""
    num_tokens: int = field(init=False)
    """Tokens known here, collected ones only."""
    sampling: SamplingParams = field(init=False)
    prefix: PrefixTicket = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = self.generate.sampling
        self.num_tokens = len(self.prompt)
        self.prefix = PrefixTicket(
            self.key[0], self.prompt_len, self.generate.prefix_cache, self.generate.cache_salt
        )

    @property
    def order(self) -> tuple[bool, int, float, SequenceKey]:
        """Sort key: the first runs first, the last gives way first. Sequences that are read come first."""
        return (self.paused, self.generate.priority, self.arrival, self.key)

    @property
    def may_decode(self) -> bool:
        return (
            not self.paused
            and self.num_tokens + self.in_flight - self.prompt_len < self.sampling.max_tokens
            and self.status is Status.RUNNING
        )

    def append(self, token: int) -> int:
        """Returns how many output tokens there are now."""
        self.generated.append(token)
        self.num_tokens += 1
        self.in_flight -= 1
        return self.num_tokens - self.prompt_len

    def token_slice(self, start: int, stop: int) -> TokenArray:
        border = len(self.prompt)
        if stop <= border:
            return self.prompt[start:stop]
        tail = np.asarray(self.generated[max(start - border, 0) : stop - border], dtype=np.int32)
        return tail if start >= border else np.concatenate([self.prompt[start:], tail])
