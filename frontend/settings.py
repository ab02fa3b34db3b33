"""Settings of the frontend and tokenizer processes, resolved by the daemon."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.child import ProcessSettings

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]


class SamplingDefaults(msgspec.Struct, frozen=True):
    """How tokens are chosen where a request does not say. As they stand here: OpenAI's."""

    temperature: Temperature = 1.0
    """0: greedy."""
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1: no limit."""
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


class TokenizerSettings(msgspec.Struct, frozen=True):
    """Everything that one tokenizer process is told."""

    process: ProcessSettings
    model_dir: str


class FrontendSettings(msgspec.Struct, frozen=True):
    """Everything that one frontend process is told."""

    process: ProcessSettings
    host: str
    """What `listen_fd` was told to listen on."""
    cors_origin: tuple[str, ...]
    """Origins whose pages may use this server."""
    listen_fd: int
    """The listening socket, opened by the daemon and shared by all frontends."""
    model_dir: str
    model_name: str
    """The id in `/v1/models`; requests must name it (or nothing)."""
    max_body_bytes: int
    body_buffer_bytes: int
    """Bytes of bodies that still arrive or wait to be read, of all connections together."""
    max_header_bytes: int
    body_seconds: float
    """Time within which a request's body must have arrived."""
    keep_alive_seconds: int
    max_choices: int
    """Largest `n`."""
    stream_high_water_bytes: int
    """Unread bytes of one stream past which its sequence is paused."""
    slow_reader_seconds: float
    """How long a paused stream may stay unread before it is aborted."""
    retry_after_seconds: int
    drain_seconds: float
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    allow_priority: bool = False
