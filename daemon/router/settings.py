"""Settings of the router, resolved by the daemon."""

from __future__ import annotations

from typing import Literal

import msgspec

from transport.child import ProcessSettings

Routing = Literal["affinity", "least-loaded"]


class RouterSettings(msgspec.Struct, frozen=True):
    """Everything that the router is told."""

    process: ProcessSettings
    workers: int
    tokenizers: int
    max_waiting: int
    """HTTP requests that may wait for a rank; one more gets 429."""
    max_waiting_choices: int
    """Choices that may wait for a rank before requests for several are refused."""
    max_waiting_bytes: int
    """Bytes of prompts that may wait for a rank before long ones are refused."""
    routing: Routing
    retry_after_seconds: int
    max_migrations: int
    """How many processes a request may have killed and still be given to another one."""
    stage_seconds: float
    """Longest stay in `tokenizing` before the request fails."""
    start_seconds: float
    """Longest wait for a tokenizer or a rank that is being started."""
