"""A frontend's HTTP side with a scripted router in its place, served on a real socket."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from daemon.cli.check.event_stream import whole_stream
from frontend.api.app import FrontendApp
from frontend.gate import Gate
from frontend.http.body_budget import BodyBudget
from frontend.http.page_rules import PageRules
from frontend.http.server import HttpLimits, HttpServer
from frontend.links.body_reader import BodyReader
from frontend.links.router_client import RouterClient
from frontend.metrics import FrontendMetrics
from frontend.services import Services
from frontend.settings import FrontendSettings
from transport.child import ProcessSettings
from transport.framing import decode_header, encode_header, token_frame
from transport.ids import ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.control import CacheCommand
from transport.messages.from_daemon import InstanceStatus
from transport.messages.generate import (
    FINISH_LENGTH,
    FINISH_STOP,
    RUNNING,
    Cancel,
    Encode,
    Encoded,
    ModelInfo,
    RequestFailed,
    StageTimes,
    Throttle,
    TokenBatch,
)
from transport.messages.to_daemon import Query
from transport.messages.to_frontend import TO_FRONTEND, Finished, Serving
from transport.messages.to_router import TO_ROUTER, Submit
from transport.telemetry.metrics import MetricSet

EOS = 256
VOCAB = 300
MODEL = "test-model"
MAX_LEN = 4096


class ByteDecoder:
    """Token n < 256 is the byte n; half a character is held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int], /) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTexts:
    """The tokenizer of the tests."""

    max_token_bytes = 1

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def token_text(self, token_id: int, /) -> str:
        return bytes([token_id]).decode("latin-1") if token_id < 256 else "<eos>"

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, ids: Sequence[int], /) -> str:
        decoder = ByteDecoder()
        return decoder.push(ids) + decoder.flush()


@dataclass
class Script:
    """How the router answers a `Submit`."""

    text: str = "Grüße aus 北京, 🌍!"
    tokens: list[int] | None = None
    """Instead of the text's bytes."""
    per_row: int = 1
    eos: bool = True
    """End with the end-of-sequence token rather than by length."""
    delay: float = 0.0
    """Seconds between two batches."""
    error: RequestFailed | None = None
    error_after: int | None = None
    """Fail after so many batches; None: at once, if there is an error."""
    hang_after: int | None = None
    """Send nothing more after so many batches."""
    cached: int = 0


@dataclass
class FakeRouter:
    """Answers on the loop's thread, through real headers."""

    script: Callable[[Submit, bytes], Script]
    sent: list[Message] = field(default_factory=list)
    client: RouterClient | None = None
    cancelled: set[tuple[RequestId, int]] = field(default_factory=set)
    paused: set[tuple[RequestId, int]] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    top_ids: list[int] = field(default_factory=lambda: list(range(20)))
    """The likely tokens of every step, the likeliest first."""

    def of_kind(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kind)]

    def send(self, message: Message, *frames: bytes) -> bool:
        message = decode_header(encode_header(message), TO_ROUTER)
        self.sent.append(message)
        payload = bytes(frames[0]) if frames else b""
        match message:
            case Submit():
                task = asyncio.get_running_loop().create_task(self._run(message, payload))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            case Encode(request_id):
                asyncio.get_running_loop().call_soon(
                    self.deliver, Encoded(request_id), token_frame(list(payload))
                )
            case Cancel(request_id, index):
                self.cancelled.add((request_id, index))
            case Throttle(request_id, index, paused):
                (self.paused.add if paused else self.paused.discard)((request_id, index))
        return True

    def deliver(self, message: Message, *frames: bytes) -> None:
        message = decode_header(encode_header(message), TO_FRONTEND)
        payload = [zmq.Frame(bytes(frame)) for frame in frames]
        self.client.handle(message, payload)

    def is_cancelled(self, request_id: RequestId, index: int) -> bool:
        return (request_id, index) in self.cancelled or (request_id, -1) in self.cancelled

    async def _run(self, submit: Submit, payload: bytes) -> None:
        script = self.script(submit, payload)
        rid, sampling = submit.request_id, submit.generate.sampling
        if script.error is not None and script.error_after is None:
            self.deliver(fail(rid, script.error))
            return
        ids = list(script.text.encode()) if script.tokens is None else list(script.tokens)
        if script.eos:
            ids.append(EOS)
        cut = len(ids) > sampling.max_tokens or not script.eos
        ids = ids[: sampling.max_tokens]
        started = [(rid, index, script.cached, len(payload)) for index in range(submit.n)]
        rows = [ids[i : i + script.per_row] for i in range(0, len(ids), script.per_row)]
        for step, row in enumerate(rows):
            if script.hang_after == step:
                return
            if script.error is not None and script.error_after == step:
                self.deliver(fail(rid, script.error))
                return
            while any((rid, i) in self.paused for i in range(submit.n)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            live = [i for i in range(submit.n) if not self.is_cancelled(rid, i)]
            if not live:
                break
            end = FINISH_LENGTH if cut else FINISH_STOP
            self._batch(submit, step, live, row, end if step == len(rows) - 1 else RUNNING, started)
            started = []
            await asyncio.sleep(script.delay)
        now = time.monotonic()
        self.deliver(Finished(rid, StageTimes(now, now, now, now, now), 0))

    def _batch(self, submit, step, live, row, finish, started) -> None:
        top = submit.generate.sampling.logprobs
        frames = [token_frame(row * len(live))]
        if top >= 0:
            words = [logprob_words(token, self.top_ids[:top]) for _ in live for token in row]
            frames.append(b"".join(words))
        self.deliver(
            TokenBatch(
                ProcessName("frontend/0"),
                step,
                [submit.request_id] * len(live),
                live,
                [len(row)] * len(live),
                [finish] * len(live),
                [top] * len(live) if top >= 0 else [],
                started,
            ),
            *frames,
        )


def logprob_words(token: int, top: list[int]) -> bytes:
    """Chosen: -token/100; the likely ones `top`: logprobs -0.5, -1.5, ..."""
    return (
        np.float32(-token / 100).tobytes()
        + np.array(top, dtype="<i4").tobytes()
        + (-0.5 - np.arange(len(top), dtype="<f4")).tobytes()
    )


def fail(request_id: RequestId, error: RequestFailed) -> RequestFailed:
    return RequestFailed(
        request_id, error.status, error.code, error.message, error.param, error.retry_after
    )


def frontend_settings(**changes: object) -> FrontendSettings:
    """Settings of a test's frontend."""
    values = {
        "process": ProcessSettings(ProcessName("frontend/0"), "frontend", "t", "/tmp", 1, "hash"),
        "host": "127.0.0.1",
        "cors_origin": (),
        "listen_fd": -1,
        "model_dir": "",
        "model_name": MODEL,
        "max_body_bytes": 4 << 20,
        "body_buffer_bytes": 64 << 20,
        "max_header_bytes": 32_768,
        "body_seconds": 5.0,
        "keep_alive_seconds": 900,
        "max_choices": 8,
        "stream_high_water_bytes": 256 << 10,
        "slow_reader_seconds": 30.0,
        "retry_after_seconds": 3,
        "drain_seconds": 5.0,
    }
    return FrontendSettings(**{**values, **changes})


class ServedFrontend:
    """A running server; `port` is where it listens."""

    def __init__(self, settings: FrontendSettings, script: Callable[[Submit, bytes], Script]):
        self.settings = settings
        self.router = FakeRouter(script)
        self.metrics = MetricSet()
        self.services: Services | None = None
        self.gate: Gate | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._server: HttpServer | None = None
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        metrics = FrontendMetrics(self.metrics)
        client = self.router.client = RouterClient(self.router.send, metrics)
        self.gate = Gate(self.settings, metrics, ByteTexts.max_token_bytes)

        async def ask_daemon(question: Query | CacheCommand) -> bytes:
            if isinstance(question, CacheCommand):
                return json.dumps(self.cache_reports).encode()
            return f"answer to {question.what}".encode()

        self.cache_reports: list[dict[str, object]] = []
        """What the daemon says about the workers' caches."""
        body_reader = BodyReader(self.settings.process)
        self.services = Services(
            settings=self.settings,
            router=client,
            gate=self.gate,
            texts=ByteTexts(),
            metrics=metrics,
            ask_daemon=ask_daemon,
            pages=PageRules(self.settings.cors_origin, self.settings.host, "127.0.0.1"),
            bodies=BodyBudget(self.settings.body_buffer_bytes, self.settings.retry_after_seconds),
            body_reader=body_reader,
            started_at=0,
        )
        self.gate.take(InstanceStatus("ready"))
        self.gate.take(Serving(ModelInfo(VOCAB, MAX_LEN, (EOS,), 10_000)))
        app = FrontendApp(self.services)
        settings = self.settings
        limits = HttpLimits(
            settings.max_header_bytes, settings.body_seconds, settings.keep_alive_seconds
        )
        self._server = HttpServer(app, limits, app.head_refused)
        ticker = self.loop.create_task(self._tick())
        self.loop.call_soon(self._ready.set)
        await self._server.serve(self._listener)
        ticker.cancel()
        await body_reader.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.services.tick(0)

    def __enter__(self) -> ServedFrontend:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], object]) -> object:
        """Run a function on the loop's thread."""
        done: list[object] = []
        event = threading.Event()

        def run() -> None:
            done.append(function())
            event.set()

        self.loop.call_soon_threadsafe(run)
        assert event.wait(10)
        return done[0]


@dataclass
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self) -> list[dict]:
        """Events of a stream, without the [DONE] that must end it."""
        return [json.loads(data) for data in whole_stream(self.body)]


def request_http(
    server: ServedFrontend,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    timeout: float = 20,
) -> HttpAnswer:
    """One HTTP request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    with contextlib.closing(connection):
        connection.request(
            method, path, data, {"Content-Type": "application/json"} | (headers or {})
        )
        answer = connection.getresponse()
        names = {key.lower(): value for key, value in answer.getheaders()}
        return HttpAnswer(answer.status, names, answer.read())
