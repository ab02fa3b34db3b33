"""The frontend process: `python -m frontend.run`, started by the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from pathlib import Path

import uvloop
import zmq

from frontend.api.app import FrontendApp
from frontend.errors import ApiError
from frontend.gate import Gate
from frontend.generation.text_decoding import TokenTexts
from frontend.http.auth import ApiKeys, ApiKeysError
from frontend.http.server import HttpLimits, HttpServer
from frontend.links.daemon_client import DaemonClient
from frontend.links.router_client import RouterClient
from frontend.links.router_line import RouterLine
from frontend.metrics import FrontendMetrics
from frontend.services import TICK_SECONDS, Services
from frontend.settings import FrontendSettings
from frontend.tokenizer.detokenizer import Detokenizer
from frontend.tokenizer.errors import TokenizerLoadError
from frontend.tokenizer.load import load_tokenizer
from transport.child import EXIT_FATAL, ProcessSettings, StopFlag, enter_process
from transport.links.daemon import (
    DaemonLink,
    LinkError,
    RouterRefusedError,
    SocketTelemetry,
    exit_code_of,
)
from transport.messages.control import CacheCommand, InstanceStatus, Query, StatusHeld
from transport.messages.telemetry import RequestRow
from transport.messages.to_frontend import Serving
from transport.sockets import Received
from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import SocketStats

INFORMED_SECONDS = 5.0
"""How long a new frontend leaves connections in the listener's queue until it knows what the router
serves, where requests may come in. As long as a router may be silent without being replaced."""

log = logging.getLogger(__name__)


class _Telemetry:
    def __init__(self, line: RouterLine) -> None:
        self._line = line

    def socket_stats(self) -> list[SocketStats]:
        return [self._line.stats()]

    def request_rows(self) -> list[RequestRow]:
        return []


class Frontend:
    """One frontend process: owner of its sockets and of the HTTP server."""

    def __init__(
        self, settings: FrontendSettings, stop: StopFlag, texts: TokenTexts, keys: ApiKeys
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._stop_asked = asyncio.Event()
        self._told = asyncio.Event()
        """Whether the daemon has said how things are."""
        self._informed = asyncio.Event()
        """Whether there is nothing more to wait for before requests are answered."""
        self._status: InstanceStatus | None = None
        """The last one, until the daemon has been told that it is acted on."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        metric_set = MetricSet()
        metrics = FrontendMetrics(metric_set)
        self._line = RouterLine(self._context, settings.process, self._on_router_lost)
        self._router = RouterClient(self._line.send, metrics)
        self._is_rejoining = False
        self._gate = Gate(settings, self._router, metrics)
        self._daemon = DaemonClient(self._on_status, self._gate.drain)
        self._link = DaemonLink(
            self._context,
            settings.process,
            metric_set,
            _Telemetry(self._line),
            self._daemon.on_message,
        )
        self._services = Services(
            settings=settings,
            router=self._router,
            gate=self._gate,
            texts=texts,
            keys=keys,
            metrics=metrics,
            ask_daemon=self._ask_daemon,
            started_at=int(time.time()),
        )
        app = FrontendApp(self._services)
        limits = HttpLimits(
            settings.max_header_bytes, settings.body_seconds, settings.keep_alive_seconds
        )
        self._server = HttpServer(app, limits, app.head_refused)

    async def _ask_daemon(self, question: Query | CacheCommand) -> bytes:
        return await self._daemon.ask(question, self._link.post)

    def _on_status(self, status: InstanceStatus) -> None:
        self._gate.set_state(status.state, status.reason)
        self._status = status
        self._told.set()
        self._hold_status()

    def _hold_status(self) -> None:
        status = self._status
        if status is None or self._gate.is_waiting_for_router:
            return
        self._status = None
        self._informed.set()
        if status.serial:
            self._link.post(StatusHeld(status.serial))

    def _on_router_lost(self) -> None:
        if not self._stop.is_set():
            self._is_rejoining = True
            self._link.set_state("loading", "joining the new router")

    def _on_router_message(self, received: Received) -> None:
        self._router.handle(received)
        if not isinstance(received.message, Serving):
            return
        self._hold_status()
        if self._is_rejoining:
            self._is_rejoining = False
            self._link.set_state("ready")

    async def run(self) -> None:
        """Serve until asked to stop.

        Raises:
            LinkError: the daemon or the router refused this process or did not answer.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._stop.fd, self._stop_asked.set)
        server = loop.create_task(self._serve_http())
        ticker = loop.create_task(self._tick())
        try:
            await asyncio.to_thread(self._link.start)
            await self._line.open(self._router, self._on_router_message)
            self._link.set_state("ready")
            stop = loop.create_task(self._stop_asked.wait())
            await asyncio.wait((stop, server), return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            loop.remove_reader(self._stop.fd)
            self._server.stop()
            self._told.set()
            self._informed.set()
            await server
            ticker.cancel()
            await self._line.close()
            await asyncio.to_thread(self._link.close)
            self._context.destroy(linger=0)

    async def _serve_http(self) -> None:
        # One of several frontends that starts late must not answer 503 where the others serve. A daemon
        # that does not say how things are ends this process.
        await self._told.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._informed.wait(), INFORMED_SECONDS)
        listener = socket.socket(fileno=self._settings.listen_fd)
        await self._server.serve(listener)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._link.tick()
            self._services.tick(self._server.connections)

    async def _drain(self) -> None:
        self._gate.drain()
        self._link.set_state("draining")
        if self._services.jobs:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._services.idle.wait(), self._settings.drain_seconds)
        if self._services.jobs:
            log.warning("ending %d requests that did not finish in time", len(self._services.jobs))
        self._services.end_all(ApiError(503, "The server is shutting down.", retry_after=1))


async def _run(
    settings: FrontendSettings, stop: StopFlag, texts: TokenTexts, keys: ApiKeys
) -> None:
    await Frontend(settings, stop, texts, keys).run()


def _tell_daemon(process: ProcessSettings, reason: str) -> None:
    """Say why this process ends for good before it has ever had a line to the daemon."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = DaemonLink(context, process, MetricSet(), SocketTelemetry(), lambda received: None)
    try:
        link.start()
        link.fatal(reason)
    except LinkError as error:
        log.error("%s", error)
    finally:
        link.close()
        context.term()


def main() -> int:
    """Entry point; returns the exit code."""
    settings, stop = enter_process(FrontendSettings)
    try:
        texts = Detokenizer(load_tokenizer(Path(settings.model_dir)).tokenizer)
        keys = ApiKeys.load(settings.api_keys_file)
    except (TokenizerLoadError, ApiKeysError) as error:
        log.error("%s", error)
        _tell_daemon(settings.process, str(error))
        return EXIT_FATAL
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, stop, texts, keys))
    except RouterRefusedError as error:
        _tell_daemon(settings.process, str(error))
        return exit_code_of(error)
    except LinkError as error:
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
