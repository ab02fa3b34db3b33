"""What the frontends are told of the instance, and which of them act on it by now.

A frontend that was told `ready` answers 503 until its own loop has come to read that, and until the
router has told it what is served: on a busy machine that takes a while. So each of them confirms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from daemon.supervision.supervisor import Child
from transport.ids import ProcessName
from transport.messages.from_daemon import ApiKeys, InstanceState, InstanceStatus

CONFIRM_SECONDS: Final = 30.0
"""How long the daemon waits for the frontends to confirm, before it goes on without."""

log = logging.getLogger(__name__)


@dataclass
class _Told:
    """How far one frontend has come. Serials: 0 is none."""

    sent: int = 0
    held: int = 0


@dataclass
class FrontendStatus:
    """The present status and its way to every frontend. No clock in here."""

    send: Callable[[ProcessName, InstanceStatus], bool]
    """False: it does not read now."""
    status: InstanceStatus
    """The present one; all frontends have to confirm its serial."""
    changed_at: float
    """CLOCK_MONOTONIC seconds at which it became the present one."""
    _told: dict[ProcessName, _Told] = field(default_factory=dict)

    def change(self, state: InstanceState, reason: str, now: float) -> bool:
        """Make this the present status; False if it is already."""
        if (state, reason) == (self.status.state, self.status.reason):
            return False
        self._replace(now, state=state, reason=reason)
        return True

    def use_keys(self, keys: ApiKeys, now: float) -> None:
        self._replace(now, keys=keys)

    def _replace(self, now: float, **changes: object) -> None:
        serial = self.status.serial + 1
        self.status = msgspec.structs.replace(self.status, serial=serial, **changes)
        self.changed_at = now

    def joined(self, name: ProcessName) -> None:
        self._told[name] = _Told()

    def held(self, name: ProcessName, serial: int) -> None:
        told = self._told.get(name)
        if told is not None:
            told.held = serial

    def deliver(self, frontends: Iterable[Child]) -> None:
        """Tell the frontends that have not been told. One that does not read is told at the next
        call."""
        for frontend in frontends:
            told = self._told.get(frontend.name)
            # One without a state is new: it has not said hello, and its name is its predecessor's.
            if told is None or not frontend.alive or frontend.state is None:
                continue
            if told.sent != self.status.serial and self.send(frontend.name, self.status):
                told.sent = self.status.serial

    def unconfirmed(self, frontends: Iterable[Child]) -> list[ProcessName]:
        """The living frontends that are not known to act on the present status."""
        serial = self.status.serial
        return [
            frontend.name
            for frontend in frontends
            if frontend.alive and self._told.get(frontend.name, _Told()).held != serial
        ]

    def all_hold(self, frontends: Iterable[Child], now: float) -> bool:
        missing = self.unconfirmed(frontends)
        if missing and now - self.changed_at < CONFIRM_SECONDS:
            return False
        if missing:
            log.warning(
                "%s: no sign within %g s of having read that the instance is ready",
                ", ".join(missing),
                CONFIRM_SECONDS,
            )
        return True
