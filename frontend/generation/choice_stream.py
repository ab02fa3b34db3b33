"""One choice of a request: from token ids to text that may be shown, up to its end."""

from __future__ import annotations

from frontend.generation.stop_strings import StopRule, StopScanner
from frontend.generation.text_decoding import TextDecoder
from transport.messages.generate import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, RUNNING

FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort"}


class ChoiceStream:
    """Decodes, looks for stop strings and counts. Pure: no input or output."""

    __slots__ = (
        "_decoder",
        "_min_tokens",
        "_scanner",
        "_text_length",
        "completion_tokens",
        "finish_reason",
        "last_at",
        "token_start",
    )

    def __init__(self, decoder: TextDecoder, stops: StopRule) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops.strings) if stops.strings else None
        self._min_tokens = stops.min_tokens
        self._text_length = 0
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.last_at = 0.0
        """When the latest token came; 0.0 before the first."""
        self.token_start = 0
        """Where the text of the tokens pushed last begins, in characters, whether it has been shown
        yet or not."""

    def push(self, ids: list[int], finish: int) -> str:
        """Take tokens, with the finish code of the last one; returns the text to show.

        Tokens after the end are ignored and not counted. To keep one event a token, push tokens
        one by one.
        """
        if self.finish_reason is not None:
            return ""
        self.completion_tokens += len(ids)
        self.token_start = self._text_length
        if finish == RUNNING:
            text = self._decoder.push(ids)
            self._text_length += len(text)
            return text if self._scanner is None else self._scan(text)
        # An end-of-sequence or stop token is counted, but is no part of the text.
        text = self._decoder.push(ids[:-1] if finish == FINISH_STOP else ids)
        text += self._decoder.flush()
        self._text_length += len(text)
        if self._scanner is not None:
            text = self._scan(text)
            if self.finish_reason is not None:
                return text
            text += self._scanner.flush()
        self.finish_reason = FINISH_REASONS[finish]
        return text

    def _scan(self, text: str) -> str:
        assert self._scanner is not None
        may_stop = self.completion_tokens > self._min_tokens
        shown, is_stopped = self._scanner.push(text, may_stop)
        if is_stopped:
            self.finish_reason = "stop"
        return shown
