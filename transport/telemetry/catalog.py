"""Every metric of an instance, once: name, kind, labels, meaning. `doc/metrics.md` shows it.

A process takes its handles by these entries; the daemon adds the prefix, and the `rank` label to what a
worker sends. Names follow vLLM where it has one, else SGLang, so that dashboards carry over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

PREFIX: Final = "deepinfer:"

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["frontend", "router", "tokenizer", "worker", "daemon"]

SECONDS_BOUNDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
)  # fmt: skip
TOKEN_BOUNDS: Final = (
    1.0, 8.0, 32.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0, 524288.0,
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` are those of the exposition, in order."""

    kind: ClassVar[Kind]
    name: str
    """Without prefix and without the suffixes of the exposition."""
    help: str
    labels: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    """Roles that count it; what several processes count is added up."""

    @property
    def exposed_name(self) -> str:
        """The name as a dashboard queries it; a histogram has _bucket, _sum and _count."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    @property
    def process_labels(self) -> tuple[str, ...]:
        """Labels whose values the process gives, which does not name its own rank."""
        return tuple(label for label in self.labels if label != "rank")


@dataclass(frozen=True)
class CounterMetric(Metric):
    kind = "counter"


@dataclass(frozen=True)
class GaugeMetric(Metric):
    kind = "gauge"


@dataclass(frozen=True)
class HistogramMetric(Metric):
    kind = "histogram"
    bounds: tuple[float, ...] = SECONDS_BOUNDS


_ALL: list[Metric] = []


class _Sources:
    """Adds entries for what certain roles count."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources
        self._rank = ("rank",) if sources == ("worker",) else ()

    def counter(self, name: str, text: str, *labels: str) -> CounterMetric:
        metric = CounterMetric(name, text, (*self._rank, *labels), self._sources)
        _ALL.append(metric)
        return metric

    def gauge(self, name: str, text: str, *labels: str) -> GaugeMetric:
        metric = GaugeMetric(name, text, (*self._rank, *labels), self._sources)
        _ALL.append(metric)
        return metric

    def histogram(
        self, name: str, text: str, *labels: str, bounds: tuple[float, ...] = SECONDS_BOUNDS
    ) -> HistogramMetric:
        metric = HistogramMetric(name, text, (*self._rank, *labels), self._sources, bounds)
        _ALL.append(metric)
        return metric


_FRONTEND = _Sources("frontend")
_ROUTER = _Sources("router")
_FRONTEND_ROUTER = _Sources("frontend", "router")
_TOKENIZER = _Sources("tokenizer")
_WORKER = _Sources("worker")
_DAEMON = _Sources("daemon")


# ---- what clients feel ----
TIME_TO_FIRST_TOKEN_SECONDS: Final = _FRONTEND.histogram(
    "time_to_first_token_seconds", "From the request's arrival to its first token."
)
INTER_TOKEN_LATENCY_SECONDS: Final = _FRONTEND.histogram(
    "inter_token_latency_seconds", "Time between two tokens of an answer."
)
E2E_REQUEST_LATENCY_SECONDS: Final = _FRONTEND.histogram(
    "e2e_request_latency_seconds",
    "From the arrival of a generating request to the end of its answer.",
)
PROMPT_TOKENS: Final = _FRONTEND.counter(
    "prompt_tokens", "Prompt tokens of the requests that began to run."
)
GENERATION_TOKENS: Final = _FRONTEND.counter("generation_tokens", "Tokens generated for clients.")
REQUEST_PROMPT_TOKENS: Final = _FRONTEND.histogram(
    "request_prompt_tokens", "Prompt length of a request, in tokens.", bounds=TOKEN_BOUNDS
)
REQUEST_SUCCESS: Final = _FRONTEND.counter(
    "request_success", "Answers completed, by the reason of their end.", "finished_reason"
)
NUM_ABORTED_REQUESTS: Final = _FRONTEND.counter(
    "num_aborted_requests",
    "Requests given up before their end, mostly because the client went away.",
)
HTTP_REQUESTS: Final = _FRONTEND.counter(
    "http_requests", "HTTP requests answered, by route and status code.", "route", "status"
)
HTTP_CONNECTIONS: Final = _FRONTEND.gauge("http_connections", "Open HTTP connections.")
HTTP_REQUESTS_ACTIVE: Final = _FRONTEND.gauge(
    "http_requests_active", "HTTP requests being answered."
)
STREAM_BUFFER_BYTES: Final = _FRONTEND.gauge(
    "stream_buffer_bytes", "Bytes of streams that clients have not read yet."
)

# ---- the way of a request ----
ADMISSION_REJECTIONS: Final = _FRONTEND_ROUTER.counter(
    "admission_rejections", "Requests turned away, by reason.", "reason"
)
ROUTER_REQUESTS: Final = _ROUTER.gauge("router_requests", "Live requests by stage.", "stage")
QUEUE_TIME_SECONDS: Final = _ROUTER.histogram(
    "queue_time_seconds",
    "From a request's being ready for a worker to its first chunk's being computed.",
)
TOKENIZER_RENDER_SECONDS: Final = _ROUTER.histogram(
    "tokenizer_render_seconds", "Rendering a prompt's chat template."
)
TOKENIZER_ENCODE_SECONDS: Final = _ROUTER.histogram(
    "tokenizer_encode_seconds", "Encoding a prompt into tokens."
)
REQUEST_MIGRATIONS: Final = _ROUTER.counter(
    "request_migrations", "Requests moved to another worker after the loss of theirs."
)
ROUTING_AFFINITY_PASSED_OVER: Final = _ROUTER.counter(
    "routing_affinity_passed_over",
    "Requests sent to another rank than their conversation's because that was overloaded.",
)
TOKENIZER_PROMPTS: Final = _TOKENIZER.counter(
    "tokenizer_prompts", "Prompts given to the tokenizers."
)
TOKENIZER_TOKENS: Final = _TOKENIZER.counter(
    "tokenizer_tokens", "Tokens that the tokenizers returned."
)
TOKENIZER_FAILURES: Final = _TOKENIZER.counter(
    "tokenizer_failures", "Prompts that could not be encoded."
)

# ---- the engine ----
NUM_REQUESTS_RUNNING: Final = _WORKER.gauge(
    "num_requests_running", "Sequences that hold a slot of the engine."
)
NUM_REQUESTS_WAITING: Final = _WORKER.gauge(
    "num_requests_waiting", "Sequences that wait for a slot or for pages."
)
KV_CACHE_USAGE_PERC: Final = _WORKER.gauge(
    "kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1."
)
KV_PAGES_USED: Final = _WORKER.gauge("kv_pages_used", "KV pages in use.")
KV_PAGES: Final = _WORKER.gauge("kv_pages", "KV pages of the pool.")
SEQUENCE_SLOTS_USED: Final = _WORKER.gauge("sequence_slots_used", "Sequence slots in use.")
SEQUENCE_SLOTS: Final = _WORKER.gauge("sequence_slots", "Sequence slots of the engine.")
GPU_MEMORY_BYTES: Final = _WORKER.gauge(
    "gpu_memory_bytes", "GPU memory that the worker has taken for tensors; absent without a GPU."
)
NUM_PREEMPTIONS: Final = _WORKER.counter(
    "num_preemptions", "Sequences set back for lack of pages; their tokens are computed again."
)
PREFILL_TOKENS_COMPUTED: Final = _WORKER.counter(
    "prefill_tokens_computed", "Prompt tokens computed."
)
DECODE_TOKENS_COMPUTED: Final = _WORKER.counter("decode_tokens_computed", "Tokens sampled.")
ENGINE_STEPS: Final = _WORKER.counter(
    "engine_steps", "Steps of the engine, by kind: prompt or decode.", "kind"
)
ENGINE_STEP_SECONDS: Final = _WORKER.histogram(
    "engine_step_seconds", "From a step's launch to its results, by kind: prompt or decode.", "kind"
)

# ---- the host prefix cache ----
PREFIX_CACHE_QUERIES: Final = _WORKER.counter(
    "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
)
PREFIX_CACHE_HITS: Final = _WORKER.counter(
    "prefix_cache_hits", "Prompt tokens taken from the prefix cache."
)
HICACHE_LOOKUPS: Final = _WORKER.counter("hicache_lookups", "Prompts looked up.")
HICACHE_HITS: Final = _WORKER.counter(
    "hicache_hits", "Prompts of which something was taken from the cache."
)
HICACHE_MISSES: Final = _WORKER.counter(
    "hicache_misses", "Prompts of which nothing was, by reason.", "reason"
)
HICACHE_CAPPED_BY_STATE: Final = _WORKER.counter(
    "hicache_capped_by_state", "Lookups that found pages past the last usable sliding-window state."
)
HICACHE_CAPPED_TOKENS: Final = _WORKER.counter("hicache_capped_tokens", "Tokens of those pages.")
HICACHE_STORED_PAGES: Final = _WORKER.counter(
    "hicache_stored_pages", "Pages stored after a prefill."
)
HICACHE_STORED_STATES: Final = _WORKER.counter(
    "hicache_stored_states", "States stored after a prefill."
)
HICACHE_EVICTED_PAGES: Final = _WORKER.counter("hicache_evicted_pages", "Pages evicted for others.")
HICACHE_EVICTED_STATES: Final = _WORKER.counter(
    "hicache_evicted_states", "States evicted for others."
)
HICACHE_SKIPPED_STORES: Final = _WORKER.counter(
    "hicache_skipped_stores", "Prompts of which something was not stored, by reason.", "reason"
)
HICACHE_FLUSHES: Final = _WORKER.counter(
    "hicache_flushes", "How often the cache was emptied on demand."
)
HICACHE_COPIED_BYTES: Final = _WORKER.counter(
    "hicache_copied_bytes",
    "Bytes copied: up to the device for hits, down from it for stores.",
    "direction",
)
HICACHE_COPY_SECONDS: Final = _WORKER.counter(
    "hicache_copy_seconds",
    "Time that the bytes of copies travelled, without what a copy waited for before, added up.",
    "direction",
)
HICACHE_PAGES: Final = _WORKER.gauge("hicache_pages", "Pages of the host pool.")
HICACHE_PAGES_USED: Final = _WORKER.gauge(
    "hicache_pages_used", "Pages of the host pool that hits can use."
)
HICACHE_STATES: Final = _WORKER.gauge("hicache_states", "State slots of the host pool.")
HICACHE_STATES_USED: Final = _WORKER.gauge(
    "hicache_states_used", "States of the host pool that hits can use."
)
HICACHE_HOST_TOTAL_TOKENS: Final = _WORKER.gauge(
    "hicache_host_total_tokens", "Tokens that the host pool holds at most."
)
HICACHE_HOST_USED_TOKENS: Final = _WORKER.gauge(
    "hicache_host_used_tokens", "Tokens that the host pool holds."
)
HICACHE_PENDING_BYTES: Final = _WORKER.gauge("hicache_pending_bytes", "Bytes of stores under way.")
HICACHE_OLDEST_PAGE_SECONDS: Final = _WORKER.gauge(
    "hicache_oldest_page_seconds",
    "Time since the last use of the page that was left alone for longest.",
)
HICACHE_RECOVERED_PAGES: Final = _WORKER.gauge(
    "hicache_recovered_pages",
    "Pages that this worker found in its pool, left by the one before it.",
)

# ---- the process group ----
INSTANCE_READY: Final = _DAEMON.gauge(
    "instance_ready", "1 while every process takes part in serving, else 0."
)
INSTANCE_UPTIME_SECONDS: Final = _DAEMON.gauge("instance_uptime_seconds", "Age of the instance.")
PROCESS_UP: Final = _DAEMON.gauge(
    "process_up", "1 while there is such a process, else 0.", "process"
)
PROCESS_RESTARTS: Final = _DAEMON.counter(
    "process_restarts", "How often a process was started again.", "process"
)
PROCESS_UPTIME_SECONDS: Final = _DAEMON.gauge(
    "process_uptime_seconds", "Age of a process.", "process"
)
PROCESS_RESIDENT_MEMORY_BYTES: Final = _DAEMON.gauge(
    "process_resident_memory_bytes", "Resident memory of a process.", "process"
)
PROCESS_CPU_SECONDS: Final = _DAEMON.counter(
    "process_cpu_seconds",
    "CPU time of a process; begins at 0 again when it is restarted.",
    "process",
)
PROCESS_HEARTBEAT_AGE_SECONDS: Final = _DAEMON.gauge(
    "process_heartbeat_age_seconds", "Time since the last snapshot of a process came.", "process"
)
PROCESS_PROGRESS_AGE_SECONDS: Final = _DAEMON.gauge(
    "process_progress_age_seconds",
    "Time since a process's main loop was seen to turn: large means that it hangs.",
    "process",
)
QUEUE_DEPTH: Final = _DAEMON.gauge("queue_depth", "Entries of a queue.", "process", "queue")
QUEUE_HIGH_WATER: Final = _DAEMON.gauge(
    "queue_high_water", "Most entries that the queue has had.", "process", "queue"
)
QUEUE_CAPACITY: Final = _DAEMON.gauge(
    "queue_capacity",
    "Bound of the queue; 0: bounded by other limits only, such as --max-waiting.",
    "process",
    "queue",
)
SOCKET_MESSAGES: Final = _DAEMON.counter(
    "socket_messages", "Messages through a process's socket.", "process", "socket", "direction"
)
SOCKET_BYTES: Final = _DAEMON.counter(
    "socket_bytes", "Bytes through a process's socket.", "process", "socket", "direction"
)
SOCKET_REFUSED_SENDS: Final = _DAEMON.counter(
    "socket_refused_sends",
    "Attempts to send that failed because the peer was gone or did not read.",
    "process",
    "socket",
)

METRICS: Final = tuple(_ALL)
BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}
