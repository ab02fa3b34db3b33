"""The answers to questions about an instance, as JSON: shared by the daemon and the command line.

The keys are an interface: they are only ever added. Units are in the names; null: not known.
"""

from __future__ import annotations

import msgspec

from transport.ids import DpRank
from transport.messages.cache_report import CacheContent
from transport.stacks import ThreadStack


class RequestCounts(msgspec.Struct, frozen=True):
    """Live requests by stage."""

    received: int = 0
    tokenizing: int = 0
    queued: int = 0
    running: int = 0


class WorkDone(msgspec.Struct, frozen=True):
    """What the instance has done since its start; these only grow."""

    prompt_tokens: int = 0
    """Prompt tokens that the workers computed."""
    generation_tokens: int = 0
    """Tokens that the workers sampled."""
    requests: int = 0
    """Generating requests that were answered."""


class StatusReport(msgspec.Struct, frozen=True):
    """`status`: does the instance serve, and what does it do?"""

    instance: str
    state: str
    """starting, ready, degraded or draining."""
    reason: str
    """Why it is not ready; empty if it is."""
    url: str
    model: str
    pid: int
    uptime_seconds: float
    accelerator: str
    run_dir: str
    ranks: int
    ranks_ready: int
    requests: RequestCounts
    work: WorkDone


class ProcessRow(msgspec.Struct, frozen=True):
    """`processes`: one process, dead ones included."""

    name: str
    role: str
    pid: int | None
    state: str
    """What it last said (starting, loading, ready, draining, stopping), or: ended, restarting."""
    detail: str
    uptime_seconds: float | None
    rss_bytes: int | None
    cpu_percent: float | None
    """Share of one core since somebody last asked."""
    cpu_seconds: float | None
    restarts: int
    heartbeat_age_seconds: float | None
    progress: int | None
    """Turns of its main loop."""
    progress_age_seconds: float | None
    """Time since the main loop was seen to turn; large: it hangs."""
    last_exit: str
    """How its predecessor ended; empty if it has none."""
    gpu_memory_bytes: int | None = None
    """What a worker has taken of its GPU for tensors; null: it uses none, or does not say."""


class RequestReport(msgspec.Struct, frozen=True):
    """`requests`: one live request. A stage that it has not reached is null."""

    request_id: str
    stage: str
    frontend: str
    rank: DpRank | None
    choices: int
    prompt_tokens: int
    output_tokens: int
    age_ms: float
    waiting_ms: float | None
    """Time between its arrival and its handover to a tokenizer."""
    tokenizing_ms: float | None
    queued_ms: float | None
    running_ms: float | None
    stage_ms: float | None = None
    """Time in its present stage; less than the others tell if it was moved to another worker."""


class QueueRow(msgspec.Struct, frozen=True):
    """`queues`: one queue."""

    process: str
    queue: str
    depth: int
    high_water: int
    """Largest depth since the process started."""
    capacity: int | None
    """null: bounded by other limits only, such as --max-waiting."""


class CacheRow(msgspec.Struct, frozen=True):
    """`cache`: the page pool of one rank and its prefix cache; null while its worker is not up, or
    has no prefix cache."""

    rank: DpRank
    process: str
    pages_used: int | None
    pages_total: int | None
    page_usage_ratio: float | None
    slots_used: int | None
    slots_total: int | None
    sequences_running: int | None
    sequences_waiting: int | None
    preemptions: int
    host_pages_used: int | None = None
    host_pages_total: int | None = None
    host_states_used: int | None = None
    host_states_total: int | None = None
    oldest_page_seconds: float | None = None
    hit_ratio: float | None = None
    """Prompt tokens taken from the prefix cache, of all that were looked up; null: none was."""
    prefix_cache: CacheContent | None = None
    """What the worker itself says, in `inspect cache` only."""
    problem: str = ""
    """Why the worker said nothing."""


class SocketRow(msgspec.Struct, frozen=True):
    """`sockets`: traffic of one socket since its process started."""

    process: str
    socket: str
    received_messages: int
    received_bytes: int
    sent_messages: int
    sent_bytes: int
    refused_sends: int
    """Attempts that failed: the peer was gone, or did not read. What must arrive is tried again."""


class CommandReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`inspect stacks`, `inspect log-level`, `inspect cache`: what one process answered."""

    process: str
    pid: int
    problem: str = ""
    """Why it did not answer; empty if it did."""
    threads: list[ThreadStack] = []
    cache: CacheContent | None = None
    log_level: str = ""
    """The level that it logs at from now on."""


class KeysReport(msgspec.Struct, frozen=True):
    """`keys`: how many there are, and which frontends do not check against them yet."""

    users: int
    admins: int
    unconfirmed: list[str]


class TapReport(msgspec.Struct, frozen=True):
    """`inspect tap`: one message that passed the router."""

    at: float
    """Unix time."""
    sender: str
    receiver: str
    message: str
    request_ids: list[str]
    header_bytes: int
    payload_bytes: int
    lost: int
    """Messages before this one that the tap was too slow for."""
    header: object = None
    """With --bodies: the fields of the message."""
    payload: list[str] = []
    """With --bodies: the beginning of each frame: text, or token ids."""


class StateReport(msgspec.Struct, frozen=True):
    """`state`: all of the above at one moment."""

    status: StatusReport
    processes: list[ProcessRow]
    requests: list[RequestReport]
    queues: list[QueueRow]
    cache: list[CacheRow]
    sockets: list[SocketRow]
