"""The ASGI application: routes, and what is done around every request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from frontend.api.openai_chat import CHAT
from frontend.api.openai_completions import COMPLETIONS
from frontend.api.routes_generate import GenerateEndpoint
from frontend.api.routes_status import (
    CacheFlush,
    DaemonAnswer,
    Health,
    ModelEndpoint,
    Models,
    Ready,
)
from frontend.api.tokenize import Detokenize, Tokenize
from frontend.errors import ApiError, ClientGone
from frontend.http.access_log import log_call, log_refusal
from frontend.http.auth import check_key
from frontend.http.call import Call
from frontend.http.reply import send_bytes, send_error
from frontend.services import Services
from transport.logs import Seldom

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Served without an API key: probes have none."""
ADMINISTRATION_PATHS = frozenset(
    {"/metrics", "/deepinfer/metrics", "/deepinfer/cache/flush", "/deepinfer/state"}
)
"""They concern all users: where there are keys for administration, they want one of those."""
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """An ASGI application for one route."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def _routes(services: Services) -> list[Route]:
    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", GenerateEndpoint(services, CHAT)),
        ("POST", "/v1/completions", GenerateEndpoint(services, COMPLETIONS)),
        ("GET", "/v1/models", Models(services)),
        ("GET", "/v1/models/{model:path}", ModelEndpoint(services)),
        ("POST", "/tokenize", Tokenize(services)),
        ("POST", "/detokenize", Detokenize(services)),
        ("GET", "/health", Health()),
        ("GET", "/ready", Ready(services)),
        ("GET", "/metrics", DaemonAnswer(services, "metrics", METRICS_TYPE)),
        ("GET", "/deepinfer/metrics", DaemonAnswer(services, "metrics", METRICS_TYPE)),
        ("POST", "/deepinfer/cache/flush", CacheFlush(services)),
        ("GET", "/deepinfer/state", DaemonAnswer(services, "state", b"application/json")),
    ]
    return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]


class FrontendApp:
    """Gives each request an id, checks where it comes from and its API key, turns every failure into an
    error object, and counts and logs the end."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tracebacks = Seldom()
        routes = _routes(services)
        self._labels = {id(route.endpoint): _label(route.path) for route in routes}
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope)
        has_started = False
        marks = self._services.pages.answer_headers(call.headers)
        marks.append((b"x-request-id", call.request_id.encode()))

        async def send_marked(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                call.status = message["status"]
                message["headers"].extend(marks)
            await send(message)

        try:
            await self._route(scope, receive, send_marked, call)
        except ClientGone:
            pass
        except ApiError as error:
            await self._fail(receive, send_marked, call, error, has_started)
        except Exception as error:
            text = "request %s failed: %r"
            log.error(text, call.request_id, error, exc_info=self._tracebacks.allows())
            failure = ApiError(500, "The server failed on this request; its log says why.")
            await self._fail(receive, send_marked, call, failure, has_started)
        finally:
            self._log(scope, call)

    def head_refused(self, status: int, request_id: str, seconds: float) -> None:
        """Count and log a request that the HTTP protocol has refused by its head."""
        self._services.metrics.answered("other", status)
        log_refusal(status, request_id, seconds)

    async def _route(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        scope["app"] = self  # makes the router raise instead of answering in plain text
        path: str = scope["path"]
        if len(path) > 1 and path.endswith("/"):
            path = scope["path"] = path.rstrip("/") or "/"
        pages = self._services.pages
        preflight = pages.preflight_headers(scope["method"], call.headers)
        if preflight is not None:
            return await send_bytes(send, 200, b"", headers=preflight)
        if path not in OPEN_PATHS:
            keys = self._services.gate.keys()
            if not keys.users:
                pages.check(call.headers)
            check_key(keys, call.headers, for_administration=path in ADMINISTRATION_PATHS)
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            raise _as_api_error(scope["method"], error.status_code, error.headers) from error

    async def _fail(
        self,
        receive: Receive,
        send: Send,
        call: Call,
        error: ApiError,
        has_started: bool,
    ) -> None:
        if has_started:
            call.abort()
        else:
            await send_error(send, receive, call, error)

    def _log(self, scope: Scope, call: Call) -> None:
        route = self._labels.get(id(scope.get("endpoint")), "other")
        now = time.monotonic()
        self._services.metrics.answered(route, call.status or 499)
        if call.work is not None:
            self._services.metrics.ended(now - call.received_at)
        log_call(call, scope["method"] if route != "other" else "-", route, now)


def _label(path: str) -> str:
    """The path as metrics and log name it; `{model:path}` concerns the router only."""
    return path.replace(":path}", "}")


def _as_api_error(method: str, status: int, headers: Mapping[str, str] | None) -> ApiError:
    if status == 405:
        allowed = sorted((headers or {}).get("Allow", "").split(", "))
        return ApiError(
            405,
            f"{method} is not possible at this path: use {' or '.join(allowed)}.",
            headers=((b"allow", ", ".join(allowed).encode()),),
        )
    return ApiError(status, "There is nothing at this path." if status == 404 else "Refused.")
