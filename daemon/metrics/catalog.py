"""Every metric of an instance, once: name, kind, labels, meaning. `doc/metrics.md` shows it.

Processes send values by name; the daemon adds the prefix, and the `rank` label to what a worker
sends. Names follow vLLM where it has one, else SGLang, so that dashboards carry over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "deepinfer:"

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["frontend", "router", "tokenizer", "worker", "daemon"]


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` are those of the exposition, in order."""

    name: str
    """Without prefix and without the suffixes of the exposition."""
    kind: Kind
    labels: tuple[str, ...]
    help: str
    sources: tuple[Source, ...]
    """Roles that count it; what several processes count is added up."""

    @property
    def exposed_name(self) -> str:
        """The name as a dashboard queries it; a histogram has _bucket, _sum and _count."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _frontend(name: str, kind: Kind, help_text: str, *labels: str) -> Metric:
    return Metric(name, kind, labels, help_text, ("frontend",))


def _router(name: str, kind: Kind, help_text: str, *labels: str) -> Metric:
    return Metric(name, kind, labels, help_text, ("router",))


def _tokenizer(name: str, kind: Kind, help_text: str, *labels: str) -> Metric:
    return Metric(name, kind, labels, help_text, ("tokenizer",))


def _worker(name: str, kind: Kind, help_text: str, *labels: str) -> Metric:
    return Metric(name, kind, ("rank", *labels), help_text, ("worker",))


def _daemon(name: str, kind: Kind, help_text: str, *labels: str) -> Metric:
    return Metric(name, kind, labels, help_text, ("daemon",))


METRICS: Final[tuple[Metric, ...]] = (
    # ---- what clients feel ----
    _frontend("time_to_first_token_seconds", "histogram",
              "From the request's arrival to its first token."),
    _frontend("inter_token_latency_seconds", "histogram",
              "Time between two tokens of an answer."),
    _frontend("e2e_request_latency_seconds", "histogram",
              "From the arrival of a generating request to the end of its answer."),
    _frontend("prompt_tokens", "counter", "Prompt tokens of the requests that began to run."),
    _frontend("generation_tokens", "counter", "Tokens generated for clients."),
    _frontend("request_prompt_tokens", "histogram", "Prompt length of a request, in tokens."),
    _frontend("request_success", "counter", "Answers completed, by the reason of their end.",
              "finished_reason"),
    _frontend("num_aborted_requests", "counter",
              "Requests given up before their end, mostly because the client went away."),
    _frontend("http_requests", "counter", "HTTP requests answered, by route and status code.",
              "route", "status"),
    _frontend("http_connections", "gauge", "Open HTTP connections."),
    _frontend("http_requests_active", "gauge", "HTTP requests being answered."),
    _frontend("stream_buffer_bytes", "gauge", "Bytes of streams that clients have not read yet."),
    # ---- the way of a request ----
    Metric("admission_rejections", "counter", ("reason",), "Requests turned away, by reason.",
           ("frontend", "router")),
    _router("router_requests", "gauge", "Live requests by stage.", "stage"),
    _router("queue_time_seconds", "histogram",
            "From a request's being ready for a worker to its first chunk's being computed."),
    _router("tokenizer_render_seconds", "histogram", "Rendering a prompt's chat template."),
    _router("tokenizer_encode_seconds", "histogram", "Encoding a prompt into tokens."),
    _router("request_migrations", "counter",
            "Requests moved to another worker after the loss of theirs."),
    _router("routing_affinity_passed_over", "counter",
            "Requests sent to another rank than their conversation's because that was overloaded."),
    _tokenizer("tokenizer_prompts", "counter", "Prompts given to the tokenizers."),
    _tokenizer("tokenizer_tokens", "counter", "Tokens that the tokenizers returned."),
    _tokenizer("tokenizer_failures", "counter", "Prompts that could not be encoded."),
    # ---- the engine ----
    _worker("num_requests_running", "gauge", "Sequences that hold a slot of the engine."),
    _worker("num_requests_waiting", "gauge", "Sequences that wait for a slot or for pages."),
    _worker("kv_cache_usage_perc", "gauge", "Share of the KV pages in use, 0 to 1."),
    _worker("kv_pages_used", "gauge", "KV pages in use."),
    _worker("kv_pages", "gauge", "KV pages of the pool."),
    _worker("sequence_slots_used", "gauge", "Sequence slots in use."),
    _worker("sequence_slots", "gauge", "Sequence slots of the engine."),
    _worker("gpu_memory_bytes", "gauge",
            "GPU memory that the worker has taken for tensors; absent without a GPU."),
    _worker("num_preemptions", "counter",
            "Sequences set back for lack of pages; their tokens are computed again."),
    _worker("prefill_tokens_computed", "counter", "Prompt tokens computed."),
    _worker("decode_tokens_computed", "counter", "Tokens sampled."),
    _worker("engine_steps", "counter", "Steps of the engine, by kind: prompt or decode.", "kind"),
    _worker("engine_step_seconds", "histogram",
            "From a step's launch to its results, by kind: prompt or decode.", "kind"),
    # ---- the host prefix cache ----
    _worker("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    _worker("prefix_cache_hits", "counter", "Prompt tokens taken from the prefix cache."),
    _worker("hicache_lookups", "counter", "Prompts looked up."),
    _worker("hicache_hits", "counter", "Prompts of which something was taken from the cache."),
    _worker("hicache_misses", "counter", "Prompts of which nothing was, by reason.", "reason"),
    _worker("hicache_capped_by_state", "counter",
            "Lookups that found pages past the last usable sliding-window state."),
    _worker("hicache_capped_tokens", "counter", "Tokens of those pages."),
    _worker("hicache_stored_pages", "counter", "Pages stored after a prefill."),
    _worker("hicache_stored_states", "counter", "States stored after a prefill."),
    _worker("hicache_evicted_pages", "counter", "Pages evicted for others."),
    _worker("hicache_evicted_states", "counter", "States evicted for others."),
    _worker("hicache_skipped_stores", "counter",
            "Prompts of which something was not stored, by reason.", "reason"),
    _worker("hicache_flushes", "counter", "How often the cache was emptied on demand."),
    _worker("hicache_copied_bytes", "counter",
            "Bytes copied: up to the device for hits, down from it for stores.", "direction"),
    _worker("hicache_copy_seconds", "counter",
            "Time that the bytes of copies travelled, without what a copy waited for before, added up.",
            "direction"),
    _worker("hicache_pages", "gauge", "Pages of the host pool."),
    _worker("hicache_pages_used", "gauge", "Pages of the host pool that hits can use."),
    _worker("hicache_states", "gauge", "State slots of the host pool."),
    _worker("hicache_states_used", "gauge", "States of the host pool that hits can use."),
    _worker("hicache_host_total_tokens", "gauge", "Tokens that the host pool holds at most."),
    _worker("hicache_host_used_tokens", "gauge", "Tokens that the host pool holds."),
    _worker("hicache_pending_bytes", "gauge", "Bytes of stores under way."),
    _worker("hicache_oldest_page_seconds", "gauge",
            "Time since the last use of the page that was left alone for longest."),
    _worker("hicache_recovered_pages", "gauge",
            "Pages that this worker found in its pool, left by the one before it."),
    # ---- the process group ----
    _daemon("instance_ready", "gauge", "1 while every process takes part in serving, else 0."),
    _daemon("instance_uptime_seconds", "gauge", "Age of the instance."),
    _daemon("process_up", "gauge", "1 while there is such a process, else 0.", "process"),
    _daemon("process_restarts", "counter", "How often a process was started again.", "process"),
    _daemon("process_uptime_seconds", "gauge", "Age of a process.", "process"),
    _daemon("process_resident_memory_bytes", "gauge", "Resident memory of a process.", "process"),
    _daemon("process_cpu_seconds", "counter",
            "CPU time of a process; begins at 0 again when it is restarted.", "process"),
    _daemon("process_heartbeat_age_seconds", "gauge",
            "Time since the last snapshot of a process came.", "process"),
    _daemon("process_progress_age_seconds", "gauge",
            "Time since a process's main loop was seen to turn: large means that it hangs.",
            "process"),
    _daemon("queue_depth", "gauge", "Entries of a queue.", "process", "queue"),
    _daemon("queue_high_water", "gauge", "Most entries that the queue has had.",
            "process", "queue"),
    _daemon("queue_capacity", "gauge",
            "Bound of the queue; 0: bounded by other limits only, such as --max-waiting.",
            "process", "queue"),
    _daemon("socket_messages", "counter", "Messages through a process's socket.",
            "process", "socket", "direction"),
    _daemon("socket_bytes", "counter", "Bytes through a process's socket.",
            "process", "socket", "direction"),
    _daemon("socket_refused_sends", "counter",
            "Attempts to send that failed because the peer was gone or did not read.",
            "process", "socket"),
)  # fmt: skip

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}
