"""One line for each request: what it was, how it ended, how many tokens, how long each stage took.

Never any text of a user.
"""

from __future__ import annotations

import logging
from typing import Final

from frontend.http.call import Call

PROBES: Final = frozenset({"/health", "/ready", "/metrics", "/deepinfer/metrics"})
"""Asked again and again by machines, some of them without a key: a good answer is no news."""

log = logging.getLogger("frontend.access")


def log_call(call: Call, method: str, route: str, now: float) -> None:
    is_probe = route in PROBES and 200 <= call.status < 300
    level = logging.DEBUG if is_probe else logging.INFO
    if not log.isEnabledFor(level):
        return
    outcome = f"{method} {route} {call.status or 'gone'} id={call.request_id}"
    log.log(level, " ".join([outcome, *(call.work or ()), span("total", call.received_at, now)]))


def log_refusal(status: int, request_id: str, seconds: float) -> None:
    log.info("- other %d id=%s %s", status, request_id, span("total", 0.0, seconds))


def span(name: str, start: float, end: float) -> str:
    """`start` and `end` are seconds."""
    return f"{name}={(end - start) * 1000:.1f}ms"
