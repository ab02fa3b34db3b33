"""Answers to questions about the instance, from what the daemon knows already: nobody is asked in
turn, so that they come at once while a process hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from daemon.inspection.control_server import QueryError
from daemon.inspection.report_types import (
    CacheRow,
    KeysReport,
    ProcessRow,
    QueueRow,
    RequestCounts,
    RequestReport,
    SocketRow,
    StateReport,
    StatusReport,
    WorkDone,
)
from daemon.metrics.exposition import DAEMON_NAME, MetricsExporter, living_pids
from daemon.supervision.instance_view import InstanceView
from daemon.supervision.supervisor import Child
from daemon.system.process_usage import ProcessUsage
from transport.ids import NO_RANK, DpRank
from transport.messages.telemetry import RequestRow, Snapshot
from transport.telemetry import catalog
from transport.telemetry.catalog import GaugeMetric


def answer(what: str, view: InstanceView, exporter: MetricsExporter) -> bytes:
    """The answer to one of `QUESTIONS`: JSON, or for `metrics` the exposition.

    Raises:
        QueryError: there is no such question.
    """
    if what == "metrics":
        return exporter.render(view)
    report = _REPORTS.get(what)
    if report is None:
        raise QueryError(f"There is no question {what!r}: ask one of {', '.join(QUESTIONS)}")
    return msgspec.json.encode(report(view, exporter))


def status(view: InstanceView, exporter: MetricsExporter) -> StatusReport:
    totals = exporter.totals(view)
    workers = [child for child in view.children.values() if child.spec.role == "worker"]
    return StatusReport(
        instance=view.instance,
        state=view.state,
        reason=view.reason,
        url=view.url,
        model=view.model_name,
        pid=view.pid,
        uptime_seconds=_seconds(view.now - view.started_at),
        accelerator=view.accelerator,
        run_dir=view.run_dir,
        ranks=len(workers),
        ranks_ready=sum(worker.ready for worker in workers),
        requests=_request_counts(view),
        work=WorkDone(
            prompt_tokens=int(totals.counter(catalog.PREFILL_TOKENS_COMPUTED)),
            generation_tokens=int(totals.counter(catalog.DECODE_TOKENS_COMPUTED)),
            requests=totals.observations(catalog.E2E_REQUEST_LATENCY_SECONDS),
        ),
    )


def processes(view: InstanceView, exporter: MetricsExporter) -> list[ProcessRow]:
    usage = exporter.usage
    rows = [_daemon_row(view, usage)]
    rows += [_process_row(child, view.now, usage) for child in view.children.values()]
    usage.keep(living_pids(view))
    return rows


def requests(view: InstanceView, _: MetricsExporter) -> list[RequestReport]:
    return [
        _request_report(row, view.now)
        for snapshot in _snapshots(view, "router")
        for row in sorted(snapshot.requests, key=lambda row: row.stages.received)
    ]


def queues(view: InstanceView, _: MetricsExporter) -> list[QueueRow]:
    return [
        QueueRow(snapshot.name, queue.name, queue.depth, queue.high_water, queue.capacity or None)
        for snapshot in _snapshots(view)
        for queue in snapshot.queues
    ]


def cache(view: InstanceView, exporter: MetricsExporter) -> list[CacheRow]:
    totals = exporter.totals(view)
    rows = []
    for child in view.children.values():
        if child.spec.role != "worker":
            continue
        rank = child.name.partition("/")[2]
        used, total = _gauge(child, catalog.KV_PAGES_USED), _gauge(child, catalog.KV_PAGES)
        ratio = None if used is None or not total else round(used / total, 4)
        queries = totals.counter(catalog.PREFIX_CACHE_QUERIES, rank)
        hits = totals.counter(catalog.PREFIX_CACHE_HITS, rank)
        rows.append(
            CacheRow(
                rank=DpRank(int(rank)),
                process=child.name,
                pages_used=used,
                pages_total=total,
                page_usage_ratio=ratio,
                slots_used=_gauge(child, catalog.SEQUENCE_SLOTS_USED),
                slots_total=_gauge(child, catalog.SEQUENCE_SLOTS),
                sequences_running=_gauge(child, catalog.NUM_REQUESTS_RUNNING),
                sequences_waiting=_gauge(child, catalog.NUM_REQUESTS_WAITING),
                preemptions=int(totals.counter(catalog.NUM_PREEMPTIONS, rank)),
                host_pages_used=_gauge(child, catalog.HICACHE_PAGES_USED),
                host_pages_total=_gauge(child, catalog.HICACHE_PAGES),
                host_states_used=_gauge(child, catalog.HICACHE_STATES_USED),
                host_states_total=_gauge(child, catalog.HICACHE_STATES),
                oldest_page_seconds=_gauge(child, catalog.HICACHE_OLDEST_PAGE_SECONDS),
                hit_ratio=round(hits / queries, 4) if queries else None,
            )
        )
    return rows


def sockets(view: InstanceView, _: MetricsExporter) -> list[SocketRow]:
    processes = [(DAEMON_NAME, view.sockets)]
    processes += [(snapshot.name, snapshot.sockets) for snapshot in _snapshots(view)]
    return [
        SocketRow(
            process=process,
            socket=socket.name,
            received_messages=socket.received,
            received_bytes=socket.received_bytes,
            sent_messages=socket.sent,
            sent_bytes=socket.sent_bytes,
            refused_sends=socket.refused,
        )
        for process, stats in processes
        for socket in stats
    ]


def state(view: InstanceView, exporter: MetricsExporter) -> StateReport:
    return StateReport(
        status=status(view, exporter),
        processes=processes(view, exporter),
        requests=requests(view, exporter),
        queues=queues(view, exporter),
        cache=cache(view, exporter),
        sockets=sockets(view, exporter),
    )


def keys(view: InstanceView, _: MetricsExporter) -> KeysReport:
    return KeysReport(len(view.keys.users), len(view.keys.admins), list(view.unconfirmed))


_REPORTS: Final[dict[str, Callable[[InstanceView, MetricsExporter], object]]] = {
    "status": status,
    "processes": processes,
    "requests": requests,
    "queues": queues,
    "cache": cache,
    "sockets": sockets,
    "keys": keys,
    "state": state,
}
QUESTIONS: Final = (*_REPORTS, "metrics")


def _snapshots(view: InstanceView, role: str | None = None) -> Iterator[Snapshot]:
    for child in view.children.values():
        if child.snapshot is not None and role in (None, child.spec.role):
            yield child.snapshot


def _request_counts(view: InstanceView) -> RequestCounts:
    counts = dict.fromkeys(RequestCounts.__struct_fields__, 0)
    for snapshot in _snapshots(view, "router"):
        for (stage,), value in snapshot.gauges.get(catalog.ROUTER_REQUESTS.name, []):
            if stage in counts:
                counts[stage] += int(value)
    return RequestCounts(**counts)


def _gauge(child: Child, metric: GaugeMetric) -> int | None:
    values = [] if child.snapshot is None else child.snapshot.gauges.get(metric.name, [])
    return int(values[0][1]) if values else None


def _daemon_row(view: InstanceView, usage: ProcessUsage) -> ProcessRow:
    used = usage.read(view.pid)
    return ProcessRow(
        name=DAEMON_NAME,
        role="daemon",
        pid=view.pid,
        state=view.state,
        detail=view.reason,
        uptime_seconds=_seconds(view.now - view.started_at),
        rss_bytes=None if used is None else used.rss_bytes,
        cpu_percent=None if used is None else round(used.cpu_percent, 1),
        cpu_seconds=None if used is None else round(used.cpu_seconds, 2),
        restarts=0,
        heartbeat_age_seconds=None,
        progress=None,
        progress_age_seconds=None,
        last_exit="",
    )


def _process_row(child: Child, now: float, usage: ProcessUsage) -> ProcessRow:
    process, snapshot = child.process, child.snapshot
    used = None if process is None else usage.read(process.pid)
    return ProcessRow(
        name=child.name,
        role=child.spec.role,
        pid=None if process is None else process.pid,
        state=_state(child),
        detail=child.fatal or child.detail,
        uptime_seconds=None if process is None else _seconds(now - process.started_at),
        rss_bytes=None if used is None else used.rss_bytes,
        cpu_percent=None if used is None else round(used.cpu_percent, 1),
        cpu_seconds=None if used is None else round(used.cpu_seconds, 2),
        restarts=child.restarts,
        heartbeat_age_seconds=None if snapshot is None else _seconds(now - child.snapshot_at),
        progress=None if snapshot is None else snapshot.progress,
        progress_age_seconds=None if snapshot is None else _seconds(now - child.progress_at),
        last_exit=child.last_exit,
        gpu_memory_bytes=_gauge(child, catalog.GPU_MEMORY_BYTES),
    )


def _state(child: Child) -> str:
    if child.process is None:
        return "ended" if child.restart_at is None else "restarting"
    return child.state or "starting"


def _request_report(row: RequestRow, now: float) -> RequestReport:
    stages = row.stages
    return RequestReport(
        request_id=row.request_id,
        stage=row.stage,
        frontend=row.frontend,
        rank=None if row.rank == NO_RANK else row.rank,
        choices=row.choices,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        age_ms=_milliseconds(now - stages.received),
        waiting_ms=_between(now, stages.received, stages.tokenizing, stages.queued),
        tokenizing_ms=_between(now, stages.tokenizing, stages.queued),
        queued_ms=_between(now, stages.queued, stages.running),
        running_ms=_between(now, stages.running),
        stage_ms=_between(now, row.stage_since),
    )


def _between(now: float, entered: float, *later: float) -> float | None:
    """Time in a stage: until the first later stage that was reached, else until now."""
    if not entered:
        return None
    left = next((moment for moment in later if moment), now)
    return _milliseconds(left - entered)


def _seconds(value: float) -> float:
    return round(max(value, 0.0), 2)


def _milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 1)
