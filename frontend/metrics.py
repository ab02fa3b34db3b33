"""What a frontend counts. The daemon owns the exposition and knows the label names."""

from __future__ import annotations

from transport.telemetry.metrics import TOKEN_BOUNDS, MetricSet

STREAM_BUFFERS = "stream_buffer_bytes"


class FrontendMetrics:
    """Handles into one `MetricSet`; used on the loop's thread."""

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self._first_token = metrics.histogram("time_to_first_token_seconds")
        self._between_tokens = metrics.histogram("inter_token_latency_seconds")
        self._whole_request = metrics.histogram("e2e_request_latency_seconds")
        self._prompt_tokens = metrics.counter("prompt_tokens")
        self._generation_tokens = metrics.counter("generation_tokens")
        self._prompt_sizes = metrics.histogram("request_prompt_tokens", bounds=TOKEN_BOUNDS)
        self._aborted = metrics.counter("num_aborted_requests")
        self._buffered = metrics.gauge(STREAM_BUFFERS)
        self._unread = metrics.queue("unread stream bytes", 0)
        self._connections = metrics.gauge("http_connections")
        self._active = metrics.gauge("http_requests_active")

    def saw_tokens(self, last_at: float, received_at: float, now: float, count: int) -> None:
        """`count` tokens of a choice came at `now`, the ones before at `last_at` (0.0: none did)."""
        if not last_at:
            self._first_token.observe(now - received_at)
        elif count == 1:
            self._between_tokens.observe(now - last_at)
        elif count:
            self._between_tokens.observe_many((now - last_at) / count, count)
        self._generation_tokens.add(count)

    def saw_prompt(self, tokens: int) -> None:
        self._prompt_tokens.add(tokens)
        self._prompt_sizes.observe(tokens)

    def finished(self, reason: str) -> None:
        self._metrics.counter("request_success", reason).add()

    def ended(self, seconds: float) -> None:
        self._whole_request.observe(seconds)

    def aborted(self) -> None:
        """A request was given up before its end."""
        self._aborted.add()

    def rejected(self, reason: str) -> None:
        """A request was turned away; `reason` is a machine-readable code of ours."""
        self._metrics.counter("admission_rejections", reason).add()

    def answered(self, route: str, status: int) -> None:
        """An HTTP request was answered; `route` is one of ours, never a raw path."""
        self._metrics.counter("http_requests", route, str(status)).add()

    def levels(self, connections: int, active: int, buffered: int) -> None:
        """Open connections, requests being answered, bytes that clients have not read."""
        self._connections.set(connections)
        self._active.set(active)
        self._buffered.set(buffered)
        self._unread.set(buffered)
