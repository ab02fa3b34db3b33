"""Conversations with known answers: what the soak of the prefix cache asks again and again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from benchmarks.clients.requests import CHAT, Asked
from daemon.cli.check.api_client import ApiClient
from daemon.cli.check.sample_text import WORDS

LONGEST_PROMPT: Final = 4096
"""Characters, where the model allows as many."""
ROOM: Final = 160
"""Characters left for an answer and the frames of its messages."""
SYSTEM_PROMPTS: Final = 3
FORKED: Final = 0.4
"""Share of the conversations that begin as an earlier one did."""
EDITED: Final = 0.3
"""Share of the forks in which a message of the shared part is changed."""
LENGTHS: Final = (1, 4, 12)
CLEAR_LEAD: Final = 1e-3
"""Natural logarithms by which every greedy token leads the second one. With less, rounding may choose,
which depends on what else is in a step; such a turn says nothing about the cache."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class KnownTurn:
    """A turn and its answer without the cache."""

    asked: Asked
    result: tuple[object, ...]
    """What `Answer.result` has to be."""


@dataclass
class KnownTurns:
    """All that can be asked, by conversation."""

    conversations: list[list[KnownTurn]]
    unclear: int = 0
    """Turns left out because a choice of a token was too close."""

    @property
    def count(self) -> int:
        return sum(map(len, self.conversations))


class _TopLogprob(msgspec.Struct):
    logprob: float


class _TokenLogprob(msgspec.Struct):
    top_logprobs: list[_TopLogprob]


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str
    logprobs: _Logprobs


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class TurnMaker:
    """Makes conversations up and asks for their answers, one after the other."""

    def __init__(self, client: ApiClient, draw: random.Random) -> None:
        self._client = client
        self._draw = draw
        # A token has at least about a character.
        self._limit = min(client.model().max_model_len or LONGEST_PROMPT, LONGEST_PROMPT) - ROOM
        self._systems = [self._text(self._limit // 5) for _ in range(SYSTEM_PROMPTS)]
        self._talks: list[Messages] = []
        self.turns = KnownTurns([])

    def make(self) -> None:
        messages = self._beginning()
        known: list[KnownTurn] = []
        while True:
            text = self._text(self._limit // self._draw.choice((5, 8, 20)))
            messages.append({"role": "user", "content": text})
            # Bytes: characters that the tokenizer does not know have a token each.
            if sum(len(m["content"].encode()) + 16 for m in messages) > self._limit:
                break
            turn, answer = self._ask(messages)
            if turn is not None:
                known.append(turn)
            messages.append({"role": "assistant", "content": answer or "?"})
        self._talks.append(messages[:-1])
        if known:
            self.turns.conversations.append(known)

    def _beginning(self) -> Messages:
        if not self._talks or self._draw.random() > FORKED:
            return [{"role": "system", "content": self._draw.choice(self._systems)}]
        messages = list(self._draw.choice(self._talks))
        # Whole turns, one of them not taken over.
        messages = messages[: 1 + 2 * self._draw.randrange(1 + len(messages[1:]) // 2)]
        if len(messages) > 1 and self._draw.random() < EDITED:
            place = self._draw.randrange(1, len(messages))
            messages[place] = {**messages[place], "content": self._text(40)}
        return messages

    def _ask(self, messages: Messages) -> tuple[KnownTurn | None, str]:
        body: dict[str, Any] = {
            "messages": list(messages), "max_tokens": self._draw.choice(LENGTHS),
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        extra = {"prefix_cache": False, "logprobs": True, "top_logprobs": 2}
        reply = msgspec.json.decode(self._client.post(CHAT, body | extra), type=_Reply)
        (choice,), usage = reply.choices, reply.usage
        leads = [
            token.top_logprobs[0].logprob - token.top_logprobs[1].logprob
            for token in choice.logprobs.content
        ]
        text = choice.message.content
        if min(leads) < CLEAR_LEAD:
            self.turns.unclear += 1
            return None, text
        said = ((0, text, choice.finish_reason),)
        result = (said, (usage.prompt_tokens, usage.completion_tokens))
        return KnownTurn(Asked(CHAT, body), result), text

    def _text(self, characters: int) -> str:
        text = " ".join(self._draw.choices(WORDS, k=max(1, characters // 4)))
        return text[: max(characters, 1)]
