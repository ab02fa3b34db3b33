"""One HTTP request as the application sees it: its id, its headers, what the log will say of it."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Callable
from typing import cast

from starlette.types import Scope

_KEPT_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_STATE_KEY = "deepinfer.call"
ABORT = "deepinfer.abort"
"""The extension of an ASGI scope that cuts the connection."""


def kept_request_id(given: bytes) -> str | None:
    """The client's `X-Request-Id`, if it is short and plain enough for the answer and the log."""
    given = given.strip()
    return given.decode() if _KEPT_ID.fullmatch(given) else None


class Call:
    """Made by the application when the head is complete, filled in on the way."""

    __slots__ = (
        "abort",
        "affinity",
        "headers",
        "id",
        "is_body_read",
        "received_at",
        "request_id",
        "status",
        "work",
    )

    def __init__(self, scope: Scope) -> None:
        self.received_at = time.monotonic()
        self.id = uuid.uuid4().hex
        """Ours, unique."""
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = kept_request_id(self.headers.get(b"x-request-id", b"")) or self.id
        """For the answer and the log: the client's, else ours."""
        session = self.headers.get(b"x-session-affinity", b"").strip()
        self.affinity = hashlib.blake2b(session, digest_size=16).hexdigest() if session else ""
        """Which conversation the client says this is (header X-Session-Affinity)."""
        self.status = 0
        self.is_body_read = False
        self.work: list[str] | None = None
        """What the access log says of a generating request; None for any other."""
        self.abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, _nothing)
        """Cuts the connection at once."""
        scope[_STATE_KEY] = self


def call_of(scope: Scope) -> Call:
    return cast("Call", scope[_STATE_KEY])


def _nothing() -> None:
    """The server offers no way to cut a connection."""
