"""The frontend process: `python -m frontend.run`, started by the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
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
from frontend.http.body_budget import BodyBudget
from frontend.http.page_rules import PageRules
from frontend.http.server import HttpLimits, HttpServer
from frontend.links.body_reader import BodyReader
from frontend.links.daemon_client import DaemonClient
from frontend.links.router_client import RouterClient
from frontend.metrics import FrontendMetrics
from frontend.readiness import News, RouterLost
from frontend.services import TICK_SECONDS, Services
from frontend.settings import FrontendSettings
from frontend.tokenizer.detokenizer import Detokenizer
from frontend.tokenizer.load import load_tokenizer
from transport.links.router_async import AsyncRouterLink
from transport.messages.from_daemon import FRONTEND_NOTICES, Drain, FrontendNotice
from transport.messages.to_daemon import StatusHeld
from transport.messages.to_frontend import TO_FRONTEND, Serving, ToFrontend
from transport.model_files import ModelError
from transport.process import Process, run_process

log = logging.getLogger(__name__)


class Frontend:
    """One frontend process: owner of its sockets and of the HTTP server."""

    def __init__(
        self,
        process: Process[FrontendSettings, FrontendNotice],
        texts: TokenTexts,
    ) -> None:
        self._settings = settings = process.settings
        self._stop = process.stop
        self._link = process.daemon
        self._stop_asked = asyncio.Event()
        metrics = FrontendMetrics(process.metrics)
        self._line: AsyncRouterLink[ToFrontend] = AsyncRouterLink(
            process.router_socket(TO_FRONTEND), settings.process.hello(), self
        )
        self._router = RouterClient(self._line.send, metrics)
        self._gate = Gate(settings, metrics, texts.max_token_bytes)
        self._daemon = DaemonClient(self._link.post, self._take)
        self._body_reader = BodyReader(settings.process)
        self._services = Services(
            settings=settings,
            router=self._router,
            gate=self._gate,
            texts=texts,
            metrics=metrics,
            ask_daemon=self._daemon.ask,
            pages=PageRules(settings.cors_origin, settings.host, _address_of(settings.listen_fd)),
            bodies=BodyBudget(settings.body_buffer_bytes, settings.retry_after_seconds),
            body_reader=self._body_reader,
            started_at=int(time.time()),  # noqa: TID251  the creation of /v1/models
        )
        app = FrontendApp(self._services)
        limits = HttpLimits(
            settings.max_header_bytes, settings.body_seconds, settings.keep_alive_seconds
        )
        self._server = HttpServer(app, limits, app.head_refused)

    def _take(self, news: News) -> None:
        before = self._gate.readiness
        self._gate.take(news)
        now = self._gate.readiness
        if now.held_serial not in (0, before.held_serial):
            self._link.post(StatusHeld(now.held_serial))
        if now.has_lost_router != before.has_lost_router and not self._stop.is_set():
            if now.has_lost_router:
                self._link.set_state("loading", "joining the new router")
            else:
                self._link.set_state("ready")

    # ---- what the router says ----

    def on_welcome(self) -> None:
        """Not enough to serve: what is served is said after it."""

    def on_router_lost(self) -> None:
        log.warning("lost the router; answering 503 until it is back")
        self._take(RouterLost())
        self._router.router_lost()

    def on_message(self, message: ToFrontend, frames: list[zmq.Frame]) -> None:
        if isinstance(message, Serving):
            self._take(message)
        else:
            self._router.handle(message, frames)

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
            await asyncio.to_thread(self._link.start, self._daemon.on_notice)
            await self._line.open(self._settings.process.connect_seconds)
            self._link.set_state("ready")
            stop = loop.create_task(self._stop_asked.wait())
            ends = (stop, server, self._line.refusal)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
            if self._line.refusal.done():
                raise self._line.refusal.result()
        finally:
            loop.remove_reader(self._stop.fd)
            self._server.stop()
            self._gate.take(Drain())  # nothing is left to wait for
            await server
            ticker.cancel()
            await self._body_reader.close()
            await self._line.close()

    async def _serve_http(self) -> None:
        await self._gate.wait_to_accept()
        listener = socket.socket(fileno=self._settings.listen_fd)
        await self._server.serve(listener)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._link.tick()
            self._services.tick(self._server.connections)

    async def _drain(self) -> None:
        self._gate.take(Drain())
        self._link.set_state("draining")
        if self._services.jobs:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._services.idle.wait(), self._settings.drain_seconds)
        if self._services.jobs:
            log.warning("ending %d requests that did not finish in time", len(self._services.jobs))
        self._services.end_all(ApiError(503, "The server is shutting down.", retry_after=1))


def _address_of(listen_fd: int) -> str:
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        address: str = listener.getsockname()[0]
        return address


async def _run(process: Process[FrontendSettings, FrontendNotice], texts: TokenTexts) -> None:
    await Frontend(process, texts).run()


def _serve(process: Process[FrontendSettings, FrontendNotice]) -> None:
    settings = process.settings
    texts = Detokenizer(load_tokenizer(Path(settings.model_dir)).tokenizer)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(process, texts))


def main() -> int:
    return run_process(FrontendSettings, FRONTEND_NOTICES, _serve, fatal=(ModelError,))


if __name__ == "__main__":
    sys.exit(main())
