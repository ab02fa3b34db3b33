"""A client of the OpenAI API that reads streams and times their first token."""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from daemon.cli.check.event_stream import BrokenStream, event_data
from daemon.errors import DeepInferError

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ANSWER_SECONDS: Final = 600.0
"""Longest silence of a server; the prefill of a long prompt on a CPU takes minutes."""

JsonBody = dict[str, object]


class RequestFailed(DeepInferError):
    """A request was not answered as asked; `kind` says so in a word or two, for counting."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class StreamedAnswer:
    """What a stream has said. Times in seconds from the request's first byte."""

    text: str = ""
    finish_reason: str | None = None
    """None: the stream was left before its end."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None: the server does not report them."""
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0

    def result(self) -> tuple[str, str | None, int]:
        return self.text, self.finish_reason, self.completion_tokens


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class OfferedModel(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    """Prompt plus output, in tokens; None: the server does not say."""


class _ModelList(msgspec.Struct):
    data: list[OfferedModel]


_read_event: Final = msgspec.json.Decoder(_Event).decode


class ApiClient:
    """One kept connection to a server. Not thread-safe; use it as a context manager or close it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Connects with the first request.

        Args:
            url: such as http://127.0.0.1:8888; a trailing /v1 is ignored.
            api_key: sent as a bearer token.

        Raises:
            DeepInferError: the URL has no host, or another scheme.
        """
        parts = _split(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        kind = http.client.HTTPConnection if parts.scheme == "http" else http.client.HTTPSConnection
        self._connection = kind(parts.netloc.rpartition("@")[2], timeout=ANSWER_SECONDS)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def get(self, path: str) -> bytes:
        """Body of a GET.

        Raises:
            RequestFailed: no answer, or one that is not 200.
        """
        return self._whole("GET", path, None)

    def post(self, path: str, body: JsonBody) -> bytes:
        """Body of the answer to a POST.

        Raises:
            RequestFailed: no answer, or one that is not 200.
        """
        return self._whole("POST", path, body)

    def model(self) -> OfferedModel:
        """The first model that the server offers.

        Raises:
            RequestFailed: no answer, or not that of OpenAI's API.
        """
        try:
            return msgspec.json.decode(self.get("/v1/models"), type=_ModelList).data[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise self._foreign("its list of models is not understood") from error

    def stream(self, path: str, body: JsonBody, leave_after: int | None = None) -> StreamedAnswer:
        """The answer, streamed, with usage.

        Args:
            path: `CHAT` or `COMPLETIONS`.
            body: the request without its stream options; one choice.
            leave_after: close the connection after so many events with a choice.

        Raises:
            RequestFailed: no answer, an error, or a stream that broke off.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        answer = StreamedAnswer()
        try:
            response = self._send("POST", path, {**body, **options})
            if response.status != 200:
                raise self._refused(response.status, response.read())
            self._read_stream(response, answer, began, leave_after)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        except RequestFailed:
            self.close()
            raise
        answer.total_seconds = time.perf_counter() - began
        return answer

    def _read_stream(
        self,
        response: http.client.HTTPResponse,
        answer: StreamedAnswer,
        began: float,
        leave_after: int | None,
    ) -> None:
        seen = 0
        try:
            for data in event_data(response):
                seen += self._take(data, answer, began)
                if seen == leave_after:
                    self.close()
                    response.close()
                    return
        except BrokenStream as error:
            raise RequestFailed(f"{self.url} broke a stream off.", "connection lost") from error
        response.read()  # the end of the body, so that the connection can be used again

    def _take(self, data: bytes, answer: StreamedAnswer, began: float) -> bool:
        """Add an event to the answer and say whether it belongs to a choice."""
        try:
            event = _read_event(data)
        except msgspec.DecodeError as error:
            raise self._foreign(str(error)) from error
        if event.error is not None:
            code = event.error.code or event.error.message
            raise RequestFailed(
                f"{self.url} ended a stream: {event.error.message}", f"event {code}"
            )
        for choice in event.choices:
            piece = choice.text or (choice.delta.content if choice.delta else None) or ""
            answer.text += piece
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            # The event that names the role comes before the first token.
            if not answer.first_token_seconds and (piece or choice.finish_reason):
                answer.first_token_seconds = time.perf_counter() - began
        if event.usage is not None:
            usage, details = event.usage, event.usage.prompt_tokens_details
            answer.prompt_tokens = usage.prompt_tokens
            answer.completion_tokens = usage.completion_tokens
            answer.cached_tokens = None if details is None else details.cached_tokens
        return bool(event.choices)

    def _whole(self, method: str, path: str, body: JsonBody | None) -> bytes:
        try:
            response = self._send(method, path, body)
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        if response.status != 200:
            raise self._refused(response.status, data)
        return data

    def _send(self, method: str, path: str, body: JsonBody | None) -> http.client.HTTPResponse:
        payload = None if body is None else msgspec.json.encode(body)
        self._connection.request(method, self._prefix + path, payload, self._headers)
        return self._connection.getresponse()

    def _broken(self, error: OSError | http.client.HTTPException) -> RequestFailed:
        self.close()
        if isinstance(error, TimeoutError):
            kind = "no answer in time"
        elif isinstance(error, ConnectionRefusedError):
            kind = "connection refused"
        else:
            kind = "connection lost"
        said = str(error) or type(error).__name__
        return RequestFailed(f"{self.url} does not answer ({said}).", kind)

    def _refused(self, status: int, body: bytes) -> RequestFailed:
        try:
            error = _read_event(body).error or _Error()
        except msgspec.DecodeError:
            error = _Error()
        words = error.message or "without a word"
        kind = f"{status} {error.code}" if error.code else str(status)
        return RequestFailed(f"{self.url} answered {status}: {words}", kind)

    def _foreign(self, why: str) -> RequestFailed:
        return RequestFailed(f"{self.url} does not speak OpenAI's API ({why}).", "not understood")


def _split(url: str) -> SplitResult:
    wrong = DeepInferError(f"{url!r} is no URL of a server: give one like http://HOST:8888.")
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise wrong
    return parts
