"""One choice of a request: from token ids to the deltas that its client gets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from frontend.generation.deltas import Delta, FinishReason, Reasoning, Text
from frontend.generation.output_parser import OutputParser
from frontend.generation.stop_strings import StopRule, StopScanner
from frontend.generation.text_decoding import TextDecoder
from transport.logprobs import TokenLogprob
from transport.messages.generate import FINISH_LENGTH, FINISH_STOP, RUNNING

FINISH_REASONS: dict[int, FinishReason] = {FINISH_STOP: "stop", FINISH_LENGTH: "length"}


class Choice:
    """Decodes, looks for stop strings, parses and counts. Pure: no input or output."""

    __slots__ = (
        "_decoder",
        "_min_tokens",
        "_parser",
        "_scanner",
        "_text_length",
        "completion_tokens",
        "finish_reason",
        "last_at",
    )

    def __init__(self, decoder: TextDecoder, stops: StopRule, parser: OutputParser) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops.strings) if stops.strings else None
        self._min_tokens = stops.min_tokens
        self._parser = parser
        self._text_length = 0
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Why the tokens ended; None: they have not."""
        self.last_at = 0.0
        """When the latest token came; 0.0 before the first."""

    def push(
        self, ids: list[int], finish: int, logprob: TokenLogprob | None = None
    ) -> Sequence[Delta]:
        """Take one token, or none where the router tells only the end; `finish` is the router's code.

        Must not be called after the end.
        """
        self.completion_tokens += len(ids)
        start = self._text_length
        # An end-of-sequence or stop token is counted, but is no part of the text.
        text = self._decoder.push(ids) if finish != FINISH_STOP else ""
        if finish != RUNNING:
            text += self._decoder.flush()
        self._text_length += len(text)
        if self._scanner is not None:
            text = self._scan(self._scanner, text, finish != RUNNING)
        deltas = self._parser.push(text) if text else ()
        if logprob is not None and finish != FINISH_STOP:
            deltas = _with_logprob(deltas, logprob, start)
        if finish != RUNNING and self.finish_reason is None:
            self.finish_reason = FINISH_REASONS[finish]
        if self.finish_reason is not None:
            return [*deltas, *self._parser.finish(self.finish_reason)]
        return deltas

    def _scan(self, scanner: StopScanner, text: str, is_end: bool) -> str:
        shown, is_stopped = scanner.push(text, self.completion_tokens > self._min_tokens)
        if is_stopped:
            self.finish_reason = "stop"
        elif is_end:
            shown += scanner.flush()
        return shown


def _with_logprob(deltas: Sequence[Delta], logprob: TokenLogprob, start: int) -> Sequence[Delta]:
    for position, delta in enumerate(deltas):
        if isinstance(delta, Text | Reasoning):
            carrier = msgspec.structs.replace(delta, logprob=logprob, start=start)
            return [*deltas[:position], carrier, *deltas[position + 1 :]]
    return [Text("", logprob, start), *deltas]
