"""A client of a live instance's control socket: asks, and asks it to stop. Never waits for ever.

The daemon answers from its own knowledge, so this works while any other process hangs.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from pathlib import Path
from typing import Final

import msgspec

from daemon.errors import DeepInferError
from daemon.inspection.instance_client import InstanceClient
from transport.framing import BadMessage
from transport.ids import ProcessName
from transport.messages.base import Message
from transport.messages.control import ProcessCommand
from transport.messages.from_daemon import TO_CLIENT, Answer
from transport.messages.to_daemon import Query, ReloadKeys, StopInstance
from transport.sockets import DealerSocket, Endpoints, Received

STOP_SECONDS: Final = 30.0
"""How long the daemon may take to say that it will stop. Long: one that was starved for a while does
stop, and who was told that it does not answer would not know."""
LOOK_SECONDS: Final = 0.25
"""While waiting, we look this often whether the daemon is still there."""


class InspectionClient(InstanceClient):
    """Owner of one socket. Use it as a context manager, on one thread."""

    def __init__(self, run_dir: Path, instance: str) -> None:
        """Connect.

        Raises:
            DeepInferError: the instance does not run.
        """
        super().__init__(run_dir, instance)
        self._serials = itertools.count(1)
        identity = ProcessName(f"client/{os.getpid()}-{secrets.token_hex(4)}")
        self._dealer = DealerSocket(
            self._context, Endpoints(str(run_dir)).control, identity, TO_CLIENT
        )

    def ask(self, what: str, timeout: float) -> bytes:
        """The daemon's answer to a question (one of `state_report.QUESTIONS`), within `timeout` s.

        Raises:
            DeepInferError: there is no such question, the daemon does not answer in time, or the
                instance has ended.
        """
        serial = next(self._serials)
        return self._exchange(Query(what, serial), serial, timeout)

    def command(self, command: ProcessCommand, timeout: float) -> bytes:
        """What every process concerned answered, a JSON list of `CommandReport`; its serial is set
        here. The daemon waits two seconds or so for processes that do not answer.

        Raises:
            DeepInferError: no such process or level, the daemon does not answer in time, or the
                instance has ended.
        """
        serial = next(self._serials)
        return self._exchange(msgspec.structs.replace(command, serial=serial), serial, timeout)

    def stop(self, drain_timeout: float | None) -> None:
        """Ask the instance to stop; returns when the daemon has taken note. None: its own limit.

        Raises:
            DeepInferError: the daemon does not answer, or the instance has ended.
        """
        serial = next(self._serials)
        self._exchange(StopInstance(drain_timeout, serial), serial, STOP_SECONDS)

    def reload_keys(self, timeout: float) -> bytes:
        """Have the files of API keys read again; a JSON `KeysReport`.

        Raises:
            DeepInferError: they cannot be used, the daemon does not answer in time, or the instance
                has ended.
        """
        serial = next(self._serials)
        return self._exchange(ReloadKeys(serial), serial, timeout)

    def close(self) -> None:
        self._dealer.close()
        self._context.term()

    def _exchange(self, message: Message, serial: int, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        self._dealer.send(message)
        while True:
            pid = self._check_alive()
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeepInferError(
                    f"Instance {self._instance!r} (process {pid}) has not answered within "
                    f"{timeout:g} s: it may have just started, or hang; read its log."
                )
            # At least one millisecond: poll(0) until the deadline would be a busy loop.
            self._dealer.socket.poll(max(round(min(left, LOOK_SECONDS) * 1000), 1))
            answer = self._find_answer(serial)
            if answer is not None:
                return answer

    def _find_answer(self, serial: int) -> bytes | None:
        """The answer among what has come, if it is there. Older answers came too late: dropped."""
        try:
            for received in self._dealer.drain():
                if received.message.serial == serial:
                    return self._read(received)
        except BadMessage as error:
            raise self._other_version() from error
        return None

    def _read(self, received: Received[Answer]) -> bytes:
        if received.message.error:
            raise DeepInferError(f"{received.message.error}.")
        return bytes(received.frames[0].buffer) if received.frames else b""
