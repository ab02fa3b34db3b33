"""The engine worker's process: `python -m workers.run`, started by the daemon."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial

from hicache.manager.null import NO_PREFIX_CACHE, PrefixManager
from transport.links.daemon import DaemonLink
from transport.messages.from_daemon import WORKER_NOTICES, WorkerNotice
from transport.messages.to_worker import TO_WORKER
from transport.process import Process, run_process
from workers.contract import PAGE_TOKENS, Engine, ModelLoadError
from workers.daemon_inbox import DaemonInbox
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.prefix_cache import check_cache_layout, open_prefix_manager
from workers.scheduling.scheduler import Scheduler
from workers.settings import EngineSettings, WorkerSettings
from workers.telemetry import WorkerTelemetry
from workers.worker import Worker

FAKE_VOCAB = 49_152
FAKE_MODEL_LEN = 8192


def main() -> int:
    return run_process(WorkerSettings, WORKER_NOTICES, _serve, fatal=(ModelLoadError,))


def _serve(process: Process[WorkerSettings, WorkerNotice]) -> None:
    settings, daemon = process.settings, process.daemon
    inbox = DaemonInbox()
    router = process.router_socket(TO_WORKER)
    daemon.start(inbox.take)
    daemon.set_state("loading", "loading the model")
    engine = create_engine(settings, daemon)
    prefixes: PrefixManager = NO_PREFIX_CACHE
    try:
        info = engine.info
        telemetry = WorkerTelemetry(process.metrics, info, _device_bytes(settings.engine))
        if settings.hicache_fd is not None:
            daemon.set_state("loading", "reserving memory for the prefix cache")
        prefixes = open_prefix_manager(settings, engine, process.metrics)
        scheduler = Scheduler(
            info, settings.engine.max_batched_tokens, settings.prefill_any_interval, prefixes.reuse
        )
        telemetry.update(scheduler)
        hello = settings.process.hello()
        worker = Worker(
            settings.rank, engine, scheduler, router, hello, inbox, daemon, telemetry, prefixes
        )
        # What start-up built lives as long as the process: spare the collector walking it.
        gc.collect()
        gc.freeze()
        worker.run(process.stop, settings.process.heartbeat_seconds)
    finally:
        engine.close()
        prefixes.close()


def create_engine(settings: WorkerSettings, daemon: DaemonLink[WorkerNotice]) -> Engine:
    """Raises `ModelLoadError` if the model cannot be loaded here."""
    wanted = settings.engine
    if wanted.kind == "fake":
        return FakeEngine(
            FakeEngineSettings(
                vocab_size=FAKE_VOCAB,
                num_pages=(FAKE_MODEL_LEN // PAGE_TOKENS) * wanted.max_num_seqs,
                max_num_seqs=wanted.max_num_seqs,
                max_model_len=wanted.max_model_len or FAKE_MODEL_LEN,
                pipeline_depth=0,
                checking=wanted.fake_checking,
                step_seconds=wanted.fake_step_seconds,
            )
        )
    # Imported here: the fake engine, and so every protocol test, starts without torch.
    from workers.engine.create import create_engine as create_model_engine  # noqa: PLC0415
    from workers.models.served_model import LoadObserver  # noqa: PLC0415

    observer = LoadObserver(
        report=lambda detail: daemon.set_state("loading", detail),
        check_layout=partial(check_cache_layout, settings),
    )
    return create_model_engine(wanted, observer)


def _device_bytes(settings: EngineSettings) -> Callable[[], int] | None:
    if settings.kind == "fake" or settings.accelerator != "nvidia":
        return None
    from workers.hardware.device import reserved_bytes  # noqa: PLC0415  as above: torch

    return partial(reserved_bytes, settings.device_index)


if __name__ == "__main__":
    sys.exit(main())
