"""Which loss a client must blame for a request that failed. Each kind of error has one cause, and a
time in which that cause can have it as its effect; anything else is unexplained.

| error | cause | when |
|---|---|---|
| broken connection | the end of a frontend | the request was on its way at that moment, and breaks then |
| `router_lost` | the end of the router | the same |
| `not_ready` | the loss of the router | from the loss until a request sent after it has succeeded |

What a lost worker or tokenizer did is no excuse for an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from benchmarks.clients.requests import Failure

NOTICE_SECONDS: Final = 2.0
"""What an effect may come late: processes and this one share busy cores."""
EARLY_SECONDS: Final = 0.25
"""A dying process closes its connections before it counts as ended."""


@dataclass
class Loss:
    """One process killed or frozen. Times are CLOCK_MONOTONIC seconds."""

    name: str
    pid: int
    frozen: bool
    state: str
    """What the process said of itself when it was hit."""
    at: float
    ended_at: float | None = None
    """When the process had ended: at once, or when the daemon had noticed that it is frozen."""
    served_after: float | None = None
    """Seconds until a request sent after the loss had succeeded."""
    replaced_after: float | None = None
    """Seconds until its successor was ready."""
    recovered_after: float | None = None
    """Seconds until its successor and `/ready` were ready and a request had succeeded then."""
    errors: int = 0
    """Requests that failed because of it."""

    @property
    def role(self) -> str:
        return self.name.partition("/")[0]

    def broke(self, ended: float) -> bool:
        at = self.ended_at
        return at is not None and at - EARLY_SECONDS <= ended <= at + NOTICE_SECONDS

    def kept_out(self, at: float) -> bool:
        """Whether there was no service at this time for want of this process."""
        back = None if self.served_after is None else self.at + self.served_after
        return self.at <= at and (back is None or at <= back + NOTICE_SECONDS)


def find_cause(failure: Failure, losses: Iterable[Loss]) -> Loss | None:
    """The loss that explains a failure, the last one if there are several; None: nothing does."""
    causes = [loss for loss in losses if _explains(loss, failure)]
    return max(causes, key=lambda loss: loss.at, default=None)


def _explains(loss: Loss, failure: Failure) -> bool:
    match loss.role, failure.kind:
        case "frontend", "connection lost" | "connection lost before the head":
            # A frontend that has ended accepts nothing: the request must have been there before.
            return loss.broke(failure.ended) and failure.began <= (loss.ended_at or loss.at)
        case "router", "503 router_lost" | "event router_lost":
            # A request may go to a router that has just ended: the frontend notices a bit later.
            return loss.broke(failure.ended)
        case "router", "503 not_ready":
            return loss.kept_out(failure.ended)
    return False
