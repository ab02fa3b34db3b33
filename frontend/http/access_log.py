"""One line a request: what, how it ended, how many tokens, how long each stage took. No user text."""

from __future__ import annotations

import logging

from frontend.http.call import Call

log = logging.getLogger("frontend.access")


def log_call(call: Call, method: str, route: str, now: float) -> None:
    """Write the line of a request that has been answered (status 0: the client left before)."""
    outcome = f"{method} {route} {call.status or 'gone'} id={call.request_id}"
    log.info(" ".join([outcome, *(call.work or ()), span("total", call.received_at, now)]))


def log_refusal(status: int, request_id: str, seconds: float) -> None:
    """Write the line of a request whose head was refused, `seconds` after it began."""
    log.info("- other %d id=%s %s", status, request_id, span("total", 0.0, seconds))


def span(name: str, start: float, end: float) -> str:
    """Times in seconds, as the log tells them."""
    return f"{name}={(end - start) * 1000:.1f}ms"
