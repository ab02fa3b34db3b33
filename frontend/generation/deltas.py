"""What a choice yields, piece by piece, for whoever writes the answer."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from frontend.errors import ApiError
from transport.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer proper.

    With logprobs every token but the one that ends the choice has exactly one `Text` or `Reasoning`
    that carries its `logprob`, with empty `text` if the token shows nothing yet.
    """

    text: str
    logprob: TokenLogprob | None = None
    start: int = 0
    """With `logprob`: where the token's own text begins in the choice's, in characters, shown or not."""


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the model thinks before it answers; fields as in `Text`."""

    text: str
    logprob: TokenLogprob | None = None
    start: int = 0


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a call, with its `id` and `name`, or a further piece of its arguments."""

    index: int
    """Which call of the choice this is, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """A piece of the JSON text."""


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The choice's last delta."""

    reason: FinishReason


Delta = Text | Reasoning | ToolCall | Finish


class DeltaConsumer(Protocol):
    """Takes all deltas of a job. Choices are numbered as the client sees them."""

    def write(self, number: int, delta: Delta, /) -> None: ...

    def fail(self, error: ApiError, /) -> None:
        """No delta follows."""
        ...
