"""Tell the service manager how the instance is: systemd's datagram protocol in a few lines.

`deepinfer start` listens with the same protocol to learn when the background instance is ready.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

PATIENCE_SECONDS: Final = 2.0
"""How long to wait for room in a busy manager's queue with what is said only once."""


class ServiceManager:
    """The peer behind $NOTIFY_SOCKET; without it every call does nothing."""

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        # A leading @ stands for the NUL byte of the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def ready(self) -> None:
        """The instance serves."""
        self._send("READY=1", PATIENCE_SECONDS)

    def status(self, text: str) -> None:
        """One line on what happens now."""
        self._send("STATUS=" + text.replace("\n", " "))

    def stopping(self) -> None:
        """The instance has begun to stop."""
        self._send("STOPPING=1", PATIENCE_SECONDS)

    def watchdog(self) -> None:
        """The instance makes progress."""
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """The running start or stop takes that much longer from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}")

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, text: str, patience: float = 0.0) -> None:
        if self._socket is not None:
            self._socket.settimeout(patience)
            # A manager that does not listen is no reason to fail.
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)


def watchdog_seconds() -> float | None:
    """The interval within which systemd expects a sign of life, if it expects any."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdigit() or meant_for != str(os.getpid()):
        return None
    return int(microseconds) / 1_000_000
