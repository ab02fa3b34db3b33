"""One line for each request: what it was, how it ended, how many tokens, how long each stage took.

Never any text of a user.
"""

from __future__ import annotations

import logging

from frontend.http.call import Call

log = logging.getLogger("frontend.access")


def log_call(call: Call, method: str, route: str, now: float) -> None:
    outcome = f"{method} {route} {call.status or 'gone'} id={call.request_id}"
    log.info(" ".join([outcome, *(call.work or ()), span("total", call.received_at, now)]))


def log_refusal(status: int, request_id: str, seconds: float) -> None:
    log.info("- other %d id=%s %s", status, request_id, span("total", 0.0, seconds))


def span(name: str, start: float, end: float) -> str:
    """`start` and `end` are seconds."""
    return f"{name}={(end - start) * 1000:.1f}ms"
