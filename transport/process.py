"""What all processes of an instance have in common: how they join it, what they own, how they end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import zmq
from msgspec.msgpack import Decoder

from transport.child import EXIT_AGAIN, EXIT_FATAL, SettingsT, StopFlag, enter_process
from transport.framing import MessageT
from transport.links.daemon import DaemonLink
from transport.links.errors import LinkError, LinkRefusedError, RouterRefusedError
from transport.messages.base import Message
from transport.messages.from_daemon import ToProcess
from transport.sockets import LINGER_MS, CountingSocket, DealerSocket, Endpoints
from transport.telemetry.metrics import MetricSet

RouterMessageT = TypeVar("RouterMessageT", bound=Message)

log = logging.getLogger(__name__)


class Process(Generic[SettingsT, MessageT]):
    """Owner of the ZMQ context and of the line to the daemon, which is not yet started."""

    def __init__(
        self, settings: SettingsT, stop: StopFlag, notices: Decoder[ToProcess | MessageT]
    ) -> None:
        self.settings = settings
        self.stop = stop
        self.metrics = MetricSet()
        self.endpoints = Endpoints(settings.process.run_dir)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[CountingSocket] = []
        self.daemon = DaemonLink(self.context, settings.process, self.metrics, notices)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.daemon.close()
        for socket in self._sockets:
            socket.close()
        # Sockets that an error left open must not make the end wait for ever.
        self.context.destroy(linger=LINGER_MS)

    def router_socket(self, decoder: Decoder[RouterMessageT]) -> DealerSocket[RouterMessageT]:
        """The socket to the router, closed with the process."""
        socket = DealerSocket(
            self.context,
            self.endpoints.router,
            self.settings.process.name,
            decoder,
            self.settings.process.max_frame,
        )
        self._sockets.append(socket)
        self.daemon.watch(socket)
        return socket

    def end_for_good(self, reason: str) -> None:
        """Tell the daemon, with which this process may not have a line yet, why it must not be started
        anew."""
        log.error("%s", reason)
        try:
            if not self.daemon.was_started:
                self.daemon.start(lambda notice, frames: None)
        except LinkError as error:
            log.error("%s", error)
        else:
            self.daemon.fatal(reason)


def run_process(
    settings_type: type[SettingsT],
    notices: Decoder[ToProcess | MessageT],
    serve: Callable[[Process[SettingsT, MessageT]], None],
    fatal: tuple[type[Exception], ...] = (),
) -> int:
    """The whole life of a process; returns its exit code.

    Args:
        notices: what this role is told by the daemon.
        serve: works until the stop flag is set; closes what it opens.
        fatal: errors that a restart would not cure. After any other, the daemon starts a new process.
    """
    for_good: tuple[type[Exception], ...] = (RouterRefusedError, *fatal)
    settings, stop = enter_process(settings_type)
    with Process(settings, stop, notices) as process:
        try:
            serve(process)
            return 0
        except for_good as error:
            process.end_for_good(str(error))
            return EXIT_FATAL
        except LinkRefusedError as error:
            log.error("%s", error)
            return EXIT_FATAL
        except LinkError as error:
            # Who did not answer may have been stopped or starved, and answers the next process.
            log.error("%s", error)
            return EXIT_AGAIN
        except Exception:
            log.exception("this process has failed: the daemon starts a new one")
            return EXIT_AGAIN
