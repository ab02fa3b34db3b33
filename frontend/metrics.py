"""What a frontend counts. The daemon owns the exposition and knows the label names."""

from __future__ import annotations

from transport.telemetry import catalog
from transport.telemetry.metrics import MetricSet


class FrontendMetrics:
    """Handles into one `MetricSet`; used on the loop's thread."""

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self._first_token = metrics.histogram(catalog.TIME_TO_FIRST_TOKEN_SECONDS)
        self._between_tokens = metrics.histogram(catalog.INTER_TOKEN_LATENCY_SECONDS)
        self._whole_request = metrics.histogram(catalog.E2E_REQUEST_LATENCY_SECONDS)
        self._prompt_tokens = metrics.counter(catalog.PROMPT_TOKENS)
        self._generation_tokens = metrics.counter(catalog.GENERATION_TOKENS)
        self._prompt_sizes = metrics.histogram(catalog.REQUEST_PROMPT_TOKENS)
        self._aborted = metrics.counter(catalog.NUM_ABORTED_REQUESTS)
        self._buffered = metrics.gauge(catalog.STREAM_BUFFER_BYTES)
        self._unread = metrics.queue("unread stream bytes", 0)
        self._connections = metrics.gauge(catalog.HTTP_CONNECTIONS)
        self._active = metrics.gauge(catalog.HTTP_REQUESTS_ACTIVE)

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
        self._metrics.counter(catalog.REQUEST_SUCCESS, reason).add()

    def ended(self, seconds: float) -> None:
        self._whole_request.observe(seconds)

    def aborted(self) -> None:
        """A request was given up before its end."""
        self._aborted.add()

    def rejected(self, reason: str) -> None:
        """A request was turned away; `reason` is a machine-readable code of ours."""
        self._metrics.counter(catalog.ADMISSION_REJECTIONS, reason).add()

    def answered(self, route: str, status: int) -> None:
        """An HTTP request was answered; `route` is one of ours, never a raw path."""
        self._metrics.counter(catalog.HTTP_REQUESTS, route, str(status)).add()

    def levels(self, connections: int, active: int, buffered: int) -> None:
        """Open connections, requests being answered, bytes that clients have not read."""
        self._connections.set(connections)
        self._active.set(active)
        self._buffered.set(buffered)
        self._unread.set(buffered)
