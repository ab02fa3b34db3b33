"""One generating API: how its requests are read, and how its answers are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from frontend.errors import ApiError
from frontend.generation.collected import CollectedChoice
from frontend.generation.deltas import Delta
from frontend.generation.request import GenerationRequest
from frontend.generation.text_decoding import TokenTexts
from frontend.generation.usage import Usage
from frontend.links.body_reader import BodyForm


class AnswerHead(msgspec.Struct, frozen=True):
    """What all parts of one answer name."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str


class AnswerWriter(Protocol):
    """Knows the shape of one answer on the wire: of `answer`, or of a stream's events, which are those
    of each delta and, after the last choice's `Finish`, `end`; or, any time, `failure`."""

    def answer(self, choices: list[CollectedChoice], /) -> bytes: ...

    def events(self, number: int, delta: Delta, /) -> bytes: ...

    def end(self) -> bytes: ...

    def failure(self, error: ApiError, /) -> bytes: ...


class Dialect(msgspec.Struct, frozen=True):
    """What an endpoint needs to serve one API."""

    id_prefix: str
    form: BodyForm[GenerationRequest]
    writer: Callable[[AnswerHead, GenerationRequest, TokenTexts, Callable[[], Usage]], AnswerWriter]
    """The last argument tells the tokens so far."""
