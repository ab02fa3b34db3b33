"""What the endpoints of one frontend share, and the clock that looks after its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from frontend.errors import ApiError
from frontend.gate import Gate
from frontend.generation.job import Job
from frontend.generation.request import GenerationRequest
from frontend.generation.text_decoding import TokenTexts
from frontend.http.body_budget import BodyBudget
from frontend.http.body_limits import BodyLimits
from frontend.http.call import Call
from frontend.http.page_rules import PageRules
from frontend.http.stream_buffer import StreamBuffer
from frontend.links.body_reader import BodyReader
from frontend.links.router_client import RouterClient
from frontend.metrics import FrontendMetrics
from frontend.settings import FrontendSettings
from transport.messages.control import CacheCommand
from transport.messages.to_daemon import Query

TICK_SECONDS = 0.5


@dataclass(eq=False)
class OpenStream:
    """A streamed answer that is being sent."""

    job: Job
    buffer: StreamBuffer
    abort: Callable[[], None]
    """Cuts the connection."""


@dataclass
class Services:
    """Parts of one frontend process. Used on the loop's thread."""

    settings: FrontendSettings
    router: RouterClient
    gate: Gate
    texts: TokenTexts
    metrics: FrontendMetrics
    ask_daemon: Callable[[Query | CacheCommand], Awaitable[bytes]]
    started_at: int
    """Seconds since 1970."""
    pages: PageRules
    bodies: BodyBudget
    body_reader: BodyReader
    jobs: set[Job] = field(default_factory=set)
    streams: set[OpenStream] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no job runs (from the end of the first one on)."""

    @property
    def body_limits(self) -> BodyLimits:
        return BodyLimits(self.settings.max_body_bytes, self.settings.body_seconds)

    def new_job(self, call: Call, request: GenerationRequest) -> Job:
        """A job for this request, not yet started."""
        job = Job(
            request, self.router, self.texts, self.metrics, call.id, call.received_at, call.affinity
        )
        self.jobs.add(job)
        self.idle.clear()
        return job

    def close_job(self, job: Job) -> None:
        """A job is over: stop what still runs of it, expect nothing more."""
        job.cancel("failed")  # a client that left has been noticed before
        job.close()
        self.jobs.discard(job)
        if not self.jobs:
            self.idle.set()

    def end_all(self, error: ApiError) -> None:
        for job in list(self.jobs):
            job.fail(error)

    def tick(self, connections: int) -> None:
        """Look after the streams: keep the silent ones alive, cut those that nobody reads."""
        now = asyncio.get_running_loop().time()
        for stream in list(self.streams):
            if stream.buffer.tick(now, self.settings.slow_reader_seconds):
                stream.job.cancel("slow_reader")
                stream.buffer.end()
                stream.abort()
        buffered = sum(stream.buffer.size for stream in self.streams)
        self.metrics.levels(connections, len(self.jobs), buffered)
