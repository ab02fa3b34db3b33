"""Tell the service manager how the instance is: systemd's datagram protocol in a few lines.

`deepinfer start` listens with the same protocol to learn when the background instance is ready.
"""

from __future__ import annotations

import os
import socket


class ServiceManager:
    """The peer behind $NOTIFY_SOCKET; without it every call does nothing.

    The kernel keeps a few datagrams for a manager that does not read: one that is busy or stopped. What
    finds no room is kept here, the last of each kind, for `deliver`.
    """

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        # A leading @ stands for the NUL byte of the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._unsent: dict[str, str] = {}
        """Keyed by the name before the equals sign, oldest first."""
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def ready(self) -> None:
        self._tell("READY=1")

    def status(self, text: str) -> None:
        self._tell("STATUS=" + text.replace("\n", " "))

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def watchdog(self) -> None:
        self._tell("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """Ask for that much more time for the running start or stop, from now on."""
        self._tell(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}")

    def deliver(self) -> None:
        if self._socket is None:
            self._unsent.clear()
        while self._socket is not None and self._unsent:
            name, text = next(iter(self._unsent.items()))
            try:
                self._socket.sendto(text.encode(), socket.MSG_DONTWAIT, self._address)
            except BlockingIOError:
                return
            except OSError:
                pass  # a manager that does not listen is no reason to fail
            del self._unsent[name]

    def close(self) -> None:
        self.deliver()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, text: str) -> None:
        name = text.partition("=")[0]
        self._unsent.pop(name, None)
        self._unsent[name] = text
        self.deliver()


def watchdog_seconds() -> float | None:
    """Interval within which systemd expects a sign of life; None: it expects none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant_for = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdigit() or meant_for != str(os.getpid()):
        return None
    return int(microseconds) / 1_000_000
