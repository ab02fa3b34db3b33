"""One choice of a request: from token ids to text that may be shown, up to its end."""

from __future__ import annotations

from frontend.stop_strings import StopScanner
from frontend.text_decoding import TextDecoder
from transport.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, RUNNING

FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort"}


class ChoiceStream:
    """Decodes, looks for stop strings and counts. Pure: no input or output."""

    __slots__ = ("_decoder", "_scanner", "completion_tokens", "finish_reason", "last_at")

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stops) if stops else None
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.last_at = 0.0
        """When the latest token came; 0.0 before the first."""

    def push(self, ids: list[int], finish: int) -> str:
        """Take tokens, with the finish code of the last one; returns the text to show.

        Tokens after the end are ignored and not counted. To keep one event a token, push tokens
        one by one.
        """
        if self.finish_reason is not None:
            return ""
        self.completion_tokens += len(ids)
        if finish == RUNNING:
            text = self._decoder.push(ids)
            return text if self._scanner is None else self._scan(text)
        # An end-of-sequence or stop token is counted, but is no part of the text.
        text = self._decoder.push(ids[:-1] if finish == FINISH_STOP else ids)
        text += self._decoder.flush()
        if self._scanner is not None:
            text = self._scan(text)
            if self.finish_reason is not None:
                return text
            text += self._scanner.flush()
        self.finish_reason = FINISH_REASONS[finish]
        return text

    def _scan(self, text: str) -> str:
        assert self._scanner is not None
        shown, is_stopped = self._scanner.push(text)
        if is_stopped:
            self.finish_reason = "stop"
        return shown
