"""One line a request: what, how it ended, how many tokens, how long each stage took. No user text."""

from __future__ import annotations

import logging
from collections import Counter

from frontend.http.call import Call
from transport.messages.generate import StageTimes

log = logging.getLogger("frontend.access")


def log_call(call: Call, method: str, route: str, now: float) -> None:
    """Write the line of a request that has been answered (status 0: the client left before)."""
    if not log.isEnabledFor(logging.INFO):
        return
    parts = [f"{method} {route} {call.status or 'gone'}", f"id={call.request_id}"]
    job = call.job
    if job is not None:
        usage = job.usage()
        parts.append(
            f"prompt={usage.prompt} completion={usage.completion} cached={usage.cached}"
            f" finish={_reasons(job.finish_reasons) or job.cancelled or 'error'}"
        )
        parts.extend(_stages(call, job.first_token_at))
    parts.append(f"total={_ms(call.received_at, now)}")
    log.info(" ".join(parts))


def _reasons(reasons: list[str]) -> str:
    """`stop` of one choice; of several how often each: a request may have more than a hundred."""
    if len(reasons) <= 1:
        return "".join(reasons)
    return ",".join(f"{reason}:{count}" for reason, count in sorted(Counter(reasons).items()))


def log_refusal(status: int, request_id: str, seconds: float) -> None:
    """Write the line of a request whose head was refused, `seconds` after it began."""
    log.info("- other %d id=%s total=%s", status, request_id, _ms(0.0, seconds))


def _stages(call: Call, first_token_at: float) -> list[str]:
    stages: StageTimes = call.stages
    spans = (
        ("tokenize", stages.tokenizing, stages.queued),
        ("queue", stages.queued, stages.running),
        ("first_token", call.received_at, first_token_at),
    )
    return [f"{name}={_ms(start, end)}" for name, start, end in spans if start and end]


def _ms(start: float, end: float) -> str:
    return f"{(end - start) * 1000:.1f}ms"
