"""Text from a client never acts as a control token.

A control token (`<|im_end|>`, `[INST]`, ...) has meaning only where the model's template writes
it. Three steps keep it so:

1. Before rendering, a *sentinel* (a private-use character that occurs nowhere in the request) is put
   behind the first character of every control token's text in the client's strings.
2. After rendering, the sentinels are taken out again; where one stood, the token's text is *plain*.
3. For encoding, every control token that is not plain is written as its *alias*: an unguessable name
   that a second tokenizer has in the token's place, under the same id. There the real name is
   ordinary text. So the whole prompt is encoded in one piece, with the tokenizer's own rules for
   spaces and borders, and only the template's tokens are control tokens.

Requests without such text take none of these steps. What is not covered: a template that glues its
own text and a client's string into one control token.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from frontend.tokenizer.errors import PromptError

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_SENTINEL_TRIES: Final = 64
_PRIVATE_USE_FIRST: Final = 0xF0000
_PRIVATE_USE_COUNT: Final = 0xFFFE
_STRUCTURAL_KEYS: Final = frozenset({"role", "type"})


@dataclass(frozen=True)
class RenderedText:
    """A prompt as text. `plain`: ranges [start, end) of control token texts that a client wrote,
    in order, not overlapping."""

    text: str
    plain: tuple[tuple[int, int], ...] = ()


class _SentinelClashError(Exception):
    """The request contains the sentinel."""


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens (`special`), and those among its
    other added tokens that the chat template writes (`template_written`)."""

    def __init__(self, special: Iterable[str], template_written: Iterable[str] = ()) -> None:
        # A token of blanks only is a matter of spacing, even when a template holds such blanks.
        self._special = frozenset(text for text in special if text.strip())
        self.all = self._special | {text for text in template_written if text.strip()}
        self._special_pattern = _any_of(self._special)
        self._pattern = _any_of(self.all)

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_templates: Iterable[str]) -> ControlTokens:
        added = tokenizer.get_added_tokens_decoder().values()
        templates = list(chat_templates)
        return cls(
            (token.content for token in added if token.special),
            (token.content for token in added if any(token.content in t for t in templates)),
        )

    def occur_in(self, value: Json) -> bool:
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, list):
            return any(self.occur_in(item) for item in value)
        if isinstance(value, dict):
            return any(self.occur_in(k) or self.occur_in(v) for k, v in value.items())
        return False

    def guard(self, messages: list[Json], *others: Json) -> tuple[str, list[Json]]:
        """Return the sentinel, and `[messages, *others]` with sentinels put in.

        Text of assistant messages is the model's own: there only special tokens are guarded, so
        that a template can still find marks such as `</think>` in it.

        Raises:
            PromptError: no free sentinel; needs a request full of private-use characters.
        """
        for _ in range(_SENTINEL_TRIES):
            sentinel = chr(_PRIVATE_USE_FIRST + secrets.randbelow(_PRIVATE_USE_COUNT))
            guard = _Guard(sentinel, self._special_pattern, self._pattern)
            try:
                return sentinel, [
                    [guard.message(message) for message in messages],
                    *(guard.value(other) for other in others),
                ]
            except _SentinelClashError:
                continue
        raise PromptError("The messages contain too many private-use characters.", "messages")

    def unguard(self, rendered: str, sentinel: str) -> RenderedText:
        pieces = re.split(f"{sentinel}|{re.escape(_escaped(sentinel))}", rendered)
        text = "".join(pieces)
        plain: list[tuple[int, int]] = []
        position = 0
        for piece in pieces[:-1]:
            position += len(piece)
            start = max(position - 1, 0)
            found = self._pattern.match(text, start)
            end = found.end() if found is not None else start + 1
            if not plain or start >= plain[-1][1]:
                plain.append((start, end))
        return RenderedText(text, tuple(plain))

    def replace_active(self, rendered: RenderedText, aliases: dict[str, str]) -> str:
        """The prompt's text with every control token that is not plain written as its alias."""
        text, pieces, done, position = rendered.text, [], 0, 0
        ranges = iter((*rendered.plain, (len(text), len(text))))
        start, end = next(ranges)
        while (found := self._pattern.search(text, position)) is not None:
            while end <= found.start() and end < len(text):
                start, end = next(ranges)
            if found.end() > start and found.start() < end:
                position = end if found.start() >= start else found.start() + 1
                continue
            pieces += [text[done : found.start()], aliases[found.group()]]
            done = position = found.end()
        pieces.append(text[done:])
        return "".join(pieces)


class _Guard:
    """Puts sentinels into the strings of a request."""

    def __init__(self, sentinel: str, special: re.Pattern[str], every: re.Pattern[str]) -> None:
        self._sentinel = sentinel
        self._escaped = _escaped(sentinel)
        self._special = special
        self._every = every

    def message(self, message: Json) -> Json:
        if not isinstance(message, dict):
            return self.value(message)
        own = self._special if message.get("role") == "assistant" else self._every
        return {
            key: value
            if key in _STRUCTURAL_KEYS
            else self._text(value, own)
            if isinstance(value, str)
            else self.value(value)
            for key, value in message.items()
        }

    def value(self, value: Json) -> Json:
        if isinstance(value, str):
            return self._text(value, self._every)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self._text(key, self._every): self.value(v) for key, v in value.items()}
        return value

    def _text(self, text: str, pattern: re.Pattern[str]) -> str:
        if self._sentinel in text or self._escaped in text.lower():
            raise _SentinelClashError
        return pattern.sub(lambda found: found[0][0] + self._sentinel + found[0][1:], text)


def _escaped(sentinel: str) -> str:
    """The sentinel as a template's JSON filter may write it."""
    return json.dumps(sentinel)[1:-1]


def alias_tokenizer(
    tokenizer: Tokenizer, control: frozenset[str]
) -> tuple[Tokenizer, dict[str, str]]:
    """A copy of `tokenizer` in which each control token has another name under the same id.

    Returns the copy (it adds no special tokens of its own) and the aliases by real name. Takes up to
    a few seconds for a large vocabulary.
    """
    secret = secrets.token_hex(16)
    aliases = {text: f"<{secret}-{i}>" for i, text in enumerate(sorted(control))}
    state = json.loads(tokenizer.to_str())
    state["post_processor"] = None
    for token in state["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model = state["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(text, text): index for text, index in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if not control.intersection([*pair, "".join(pair)])
        ]
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False)), aliases


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `texts` at a position; built as a tree, for there may be thousands."""
    return re.compile(_branch(sorted(texts), 0) or r"(?!)")


def _branch(texts: list[str], depth: int) -> str:
    """Pattern for the sorted `texts` from character `depth` on; they agree before it."""
    if not texts:
        return ""
    first, last = texts[0], texts[-1]
    shared = depth
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    head = re.escape(first[depth:shared])
    ends_here = len(first) == shared
    groups: dict[str, list[str]] = {}
    for text in texts[1:] if ends_here else texts:
        groups.setdefault(text[shared], []).append(text)
    if not groups:
        return head
    tail = "|".join(_branch(group, shared) for group in groups.values())
    return f"{head}(?:{tail}){'?' if ends_here else ''}"
