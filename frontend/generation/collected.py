"""The deltas of a choice, put together again."""

from __future__ import annotations

from typing import assert_never

from frontend.generation.deltas import Delta, Finish, FinishReason, Reasoning, Text, ToolCall
from transport.logprobs import TokenLogprob


class CollectedChoice:
    """A choice of an answer that is sent in one piece."""

    def __init__(self) -> None:
        self.logprobs: list[TokenLogprob] = []
        self.starts: list[int] = []
        """Where the text of each of `logprobs` begins."""
        self.finish_reason: FinishReason = "stop"
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[ToolCall]] = {}

    def add(self, delta: Delta) -> None:
        match delta:
            case Text():
                self._text.append(delta.text)
                self._note_logprob(delta)
            case Reasoning():
                self._reasoning.append(delta.text)
                self._note_logprob(delta)
            case ToolCall():
                self._calls.setdefault(delta.index, []).append(delta)
            case Finish():
                self.finish_reason = delta.reason
            case _:
                assert_never(delta)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(index, pieces[0].id, pieces[0].name, "".join(p.arguments for p in pieces))
            for index, pieces in self._calls.items()
        ]

    def _note_logprob(self, delta: Text | Reasoning) -> None:
        if delta.logprob is not None:
            self.logprobs.append(delta.logprob)
            self.starts.append(delta.start)
