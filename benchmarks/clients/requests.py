"""The requests of the chaos run, an HTTP client that survives a broken connection, and what an
answer holds. Only what the API promises is compared: text, finish reason, usage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from daemon.cli.check.event_stream import BrokenStream, event_data

WORDS: Final = ("hello", "the", "rain", "tea", "night", "é", "한", "🙂", "seven", "lamp", "or", "?")
LENGTHS: Final = (8, 40, 120, 240, 400)
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ANSWER_SECONDS: Final = 90.0
_TEXT: Final = re.compile(rb'"(?:content|text)":"[^"]')


@dataclass(frozen=True)
class Asked:
    """One request of the set; `stream` is chosen anew each time it is sent."""

    path: str
    body: dict[str, Any]
    wants_stop: bool = False


@dataclass
class Text:
    """What one choice has said so far."""

    text: str = ""
    finish: str | None = None


@dataclass
class Answer:
    """All that came back, whole or not."""

    status: int = 0
    """0: no answer at all."""
    choices: dict[int, Text] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens."""
    cached: int = 0
    """Prompt tokens that came from the prefix cache: no part of what has to be equal."""
    error: str | None = None
    """The API's code, or its words, from the body of an error or from an event."""
    complete: bool = False
    """Ended as HTTP and the API want it."""
    timed_out: bool = False
    first_text_seconds: float | None = None
    """From before the connection was opened until the first text of a stream had come."""

    def result(self) -> tuple[object, ...]:
        choices = tuple((i, c.text, c.finish) for i, c in sorted(self.choices.items()))
        return choices, self.usage

    def is_begun(self, whole: Answer) -> bool:
        """Whether all text so far is the beginning of `whole`'s."""
        return all(
            index in whole.choices and whole.choices[index].text.startswith(choice.text)
            for index, choice in self.choices.items()
        )


@dataclass(frozen=True)
class Failure:
    """A request that was not answered as asked."""

    asked: Asked
    answer: Answer
    began: float
    ended: float

    @property
    def kind(self) -> str:
        answer = self.answer
        if answer.timed_out:
            return "no answer in time"
        if answer.error is None:
            return "connection lost" if answer.status else "connection lost before the head"
        return f"{'event' if answer.status == 200 else answer.status} {answer.error}"


def make_requests(seed: int, count: int, lengths: Sequence[int] = LENGTHS) -> list[Asked]:
    """Greedy and seeded, both endpoints, one choice and two, with and without stop strings."""
    draw = random.Random(seed)
    return [_make_one(draw, number, lengths) for number in range(count)]


def _make_one(draw: random.Random, number: int, lengths: Sequence[int]) -> Asked:
    text = " ".join(draw.choices(WORDS, k=draw.choice((2, 10, 60))))
    body: dict[str, Any] = {"max_tokens": lengths[number % len(lengths)], "temperature": 0}
    if number % 3:
        body |= {"temperature": draw.uniform(0.5, 1.3), "seed": draw.randrange(1 << 40)}
    if number % 2:
        body["ignore_eos"] = True
    if number % 4 == 3:
        body["n"] = 2
    if draw.random() < 0.5:
        body["messages"] = [{"role": "user", "content": text}]
        path = CHAT
    else:
        body["prompt"] = text
        path = COMPLETIONS
    return Asked(path, body, wants_stop=number % 3 == 2)


def with_stop(asked: Asked, answer: Answer, draw: random.Random) -> Asked:
    """The same request with a stop string that cuts its known answer somewhere behind the middle."""
    text = answer.choices[0].text
    at = draw.randrange(len(text) // 2, max(len(text) - 4, len(text) // 2 + 1))
    stop = text[at : at + 4]
    if not asked.wants_stop or not stop.strip():
        return asked
    return Asked(asked.path, {**asked.body, "stop": stop})


async def ask(
    port: int, asked: Asked, stream: bool, leave_after: int | None = None
) -> Answer | None:
    """Send a request on a connection of its own. None: the client left after `leave_after`
    bytes."""
    body = dict(asked.body)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    received = _Received()
    timed_out = False
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if await _exchange(port, asked.path, body, received, leave_after):
                return None
    except TimeoutError:
        timed_out = True
    except OSError:
        pass  # What has come is judged, and that it is not whole.
    answer = read_answer(bytes(received.data), stream)
    answer.timed_out = timed_out
    answer.first_text_seconds = received.first_text_seconds
    return answer


class _Received:
    """The bytes of an answer."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.first_text_seconds: float | None = None
        self._began = time.perf_counter()

    def add(self, piece: bytes) -> None:
        self.data += piece
        if self.first_text_seconds is None and _TEXT.search(self.data):
            self.first_text_seconds = time.perf_counter() - self._began


async def get_status(port: int, path: str) -> int:
    """Status of a GET; 0 without an answer."""
    received = _Received()
    try:
        async with asyncio.timeout(5.0):
            await _exchange(port, path, None, received, None)
    except (OSError, TimeoutError):
        pass
    return read_answer(bytes(received.data), stream=False).status


async def _exchange(
    port: int,
    path: str,
    body: dict[str, Any] | None,
    received: _Received,
    leave_after: int | None,
) -> bool:
    """Receive the answer; True if the client left before its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        writer.write(
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Connection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        while leave_after is None or len(received.data) < leave_after:
            data = await reader.read(1 << 16)
            if not data:
                return False
            received.add(data)
        return True
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def read_answer(raw: bytes, stream: bool) -> Answer:
    """Understand an answer that may have been cut off anywhere."""
    answer = Answer()
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        return answer
    answer.status = int(head.split()[1])
    headers = head.lower()
    if b"transfer-encoding: chunked" in headers:
        body, whole = _join_chunks(body)
    else:
        length = headers.partition(b"content-length:")[2].split(b"\r\n")[0]
        whole = bool(length) and len(body) == int(length)
    if answer.status == 200 and stream:
        _read_events(body, answer)
    elif whole and b"application/json" in headers:
        _read_event(json.loads(body), answer)
        answer.complete = answer.error is None
    return answer


def _join_chunks(data: bytes) -> tuple[bytes, bool]:
    parts: list[bytes] = []
    while True:
        line, separator, rest = data.partition(b"\r\n")
        if not separator:
            return b"".join(parts), False
        size = int(line, 16)
        if size == 0:
            return b"".join(parts), True
        parts.append(rest[:size])
        data = rest[size + 2 :]


def _read_events(body: bytes, answer: Answer) -> None:
    # What follows the last line end is cut.
    lines = body.split(b"\n")[:-1]
    with contextlib.suppress(BrokenStream):
        for data in event_data(lines):
            _read_event(json.loads(data), answer)
        answer.complete = answer.error is None


def _read_event(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        error = event["error"]
        answer.error = error.get("code") or error["message"]
        return
    for choice in event.get("choices", ()):
        found = answer.choices.setdefault(choice["index"], Text())
        said = choice.get("delta") or choice.get("message")
        found.text += (choice.get("text") if said is None else said.get("content")) or ""
        found.finish = choice["finish_reason"] or found.finish
    usage = event.get("usage")
    if usage:
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        answer.cached = usage["prompt_tokens_details"]["cached_tokens"]
