"""What can be asked about the server itself."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from frontend.errors import ApiError
from frontend.http.body_limits import check_type
from frontend.http.call import call_of
from frontend.http.json_body import JsonObject
from frontend.http.reply import send_bytes
from frontend.services import Services
from transport.messages.cache_report import CacheContent
from transport.messages.control import CacheCommand
from transport.messages.to_daemon import Query


class Health:
    """`GET /health`: this process is alive."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, b'{"status":"ok"}')


class Ready:
    """`GET /ready`: whether requests are served, and if not, why."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        readiness = self._services.gate.readiness.answer()
        headers = []
        if not readiness.ready:
            seconds = self._services.settings.retry_after_seconds
            headers.append((b"retry-after", str(seconds).encode()))
        status = 200 if readiness.ready else 503
        await send_bytes(send, status, msgspec.json.encode(readiness), headers=headers)


def _describe(services: Services) -> JsonObject:
    model = services.gate.readiness.model
    length = None if model is None else model.max_model_len
    return {
        "id": services.settings.model_name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "deepinfer",
        "max_model_len": length,
        "context_length": length,
        "sampling_defaults": msgspec.to_builtins(services.settings.sampling_defaults),
    }


class Models:
    """`GET /v1/models`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = {"object": "list", "data": [_describe(self._services)]}
        await send_bytes(send, 200, msgspec.json.encode(answer))


class ModelEndpoint:
    """`GET /v1/models/{id}`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._services.settings.model_name
        if scope["path_params"]["model"] != served:
            raise ApiError(
                404,
                f"No such model here: this server has {served!r}.",
                param="model",
                code="model_not_found",
            )
        await send_bytes(send, 200, msgspec.json.encode(_describe(self._services)))


class DaemonAnswer:
    """Hands a question on to the daemon, which owns metrics and state."""

    def __init__(self, services: Services, what: str, content_type: bytes) -> None:
        self._services = services
        self._what = what
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.ask_daemon(Query(self._what))
        await send_bytes(send, 200, body, self._content_type)


class _WorkerReport(msgspec.Struct):
    """What the daemon passes on from one worker."""

    process: str
    problem: str = ""
    cache: CacheContent | None = None


class CacheFlush:
    """`POST /deepinfer/cache/flush`: empties every worker's prefix cache, and tells what each held."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = call_of(scope).headers
        if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
            check_type(headers)
        body = await self._services.ask_daemon(CacheCommand("flush", 0))
        reports = msgspec.json.decode(body, type=list[_WorkerReport])
        silent = [f"{report.process}: {report.problem}" for report in reports if report.problem]
        if silent:
            done = ", ".join(report.process for report in reports if not report.problem) or "none"
            raise ApiError(
                503,
                f"Not every cache was emptied ({'; '.join(silent)}); emptied: {done}. Ask again: a cache "
                "may be emptied twice.",
                code="not_all_flushed",
                retry_after=self._services.settings.retry_after_seconds,
            )
        flushed = [
            {
                "worker": report.process,
                "pages": report.cache.pages_used,
                "states": report.cache.states_used,
            }
            for report in reports
            if report.cache is not None and report.cache.enabled
        ]
        await send_bytes(send, 200, msgspec.json.encode({"flushed": flushed}))
