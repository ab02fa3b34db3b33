"""The engine worker's process: `python -m workers.run`, started by the daemon."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from functools import partial

import zmq

from hicache.errors import PrefixLoadError
from hicache.manager.null import NO_PREFIX_CACHE, PrefixManager
from transport.child import EXIT_AGAIN, EXIT_FATAL, StopFlag, enter_process
from transport.links.daemon import (
    DaemonLink,
    LinkError,
    RouterRefusedError,
    SocketTelemetry,
    exit_code_of,
)
from transport.messages.base import PROTOCOL_VERSION, Hello
from transport.sockets import DealerSocket, Endpoints
from transport.telemetry.metrics import MetricSet
from workers.contract import PAGE_TOKENS, Engine, EngineError, ModelLoadError
from workers.daemon_inbox import DaemonInbox
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.prefix_cache import check_cache_layout, open_prefix_manager
from workers.scheduling.scheduler import Scheduler
from workers.settings import EngineSettings, WorkerSettings
from workers.worker import Worker, WorkerTelemetry

FAKE_VOCAB = 49_152
FAKE_MODEL_LEN = 8192

log = logging.getLogger(__name__)


def main() -> int:
    """Load the model, then serve until SIGTERM. Returns the exit code."""
    settings, stop = enter_process(WorkerSettings)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = DealerSocket(
        context, Endpoints(settings.process.run_dir).router, settings.process.name
    )
    metrics = MetricSet()
    inbox = DaemonInbox()
    link = DaemonLink(context, settings.process, metrics, SocketTelemetry(dealer), inbox.notice)
    try:
        link.start()
        return _serve(settings, stop, dealer, link, metrics, inbox)
    except LinkError as error:
        return exit_code_of(error)
    finally:
        link.close()
        dealer.close()
        context.term()


def _serve(
    settings: WorkerSettings,
    stop: StopFlag,
    dealer: DealerSocket,
    link: DaemonLink,
    metrics: MetricSet,
    inbox: DaemonInbox,
) -> int:
    link.set_state("loading", "loading the model")
    engine: Engine | None = None
    prefixes: PrefixManager = NO_PREFIX_CACHE
    try:
        engine = create_engine(settings, link)
        info = engine.info
        telemetry = WorkerTelemetry(metrics, info, _device_bytes(settings.engine))
        if settings.hicache_fd is not None:
            link.set_state("loading", "reserving memory for the prefix cache")
        prefixes = open_prefix_manager(settings, engine, metrics)
        scheduler = Scheduler(
            info, settings.engine.max_batched_tokens, settings.prefill_any_interval, prefixes.reuse
        )
        telemetry.update(scheduler)
        worker = Worker(settings.rank, engine, scheduler, dealer, link, telemetry, prefixes)
        # What start-up built lives as long as the process: spare the collector walking it.
        gc.collect()
        gc.freeze()
        worker.run(stop, _hello(settings), inbox, settings.process.heartbeat_seconds)
        return 0
    except ModelLoadError as error:
        log.error("%s", error)
        link.fatal(str(error))
        return EXIT_FATAL
    except RouterRefusedError as error:
        link.fatal(str(error))
        return exit_code_of(error)
    except (EngineError, PrefixLoadError):
        log.exception("the engine failed; the daemon starts this worker anew")
        return EXIT_AGAIN
    finally:
        if engine is not None:
            engine.close()
        prefixes.close()


def create_engine(settings: WorkerSettings, link: DaemonLink) -> Engine:
    """The engine that the settings ask for, loaded and ready.

    Raises:
        ModelLoadError: the model cannot be loaded here.
    """
    wanted = settings.engine
    if wanted.kind == "fake":
        return FakeEngine(
            FakeEngineSettings(
                vocab_size=FAKE_VOCAB,
                num_pages=(FAKE_MODEL_LEN // PAGE_TOKENS) * wanted.max_num_seqs,
                max_num_seqs=wanted.max_num_seqs,
                max_model_len=wanted.max_model_len or FAKE_MODEL_LEN,
                pipeline_depth=0,
                checking=False,
                step_seconds=wanted.fake_step_seconds,
            )
        )
    # Imported here: the fake engine, and so every protocol test, starts without torch.
    from workers.engine.create import create_engine as create_model_engine  # noqa: PLC0415
    from workers.models.served_model import LoadObserver  # noqa: PLC0415

    observer = LoadObserver(
        report=lambda detail: link.set_state("loading", detail),
        check_layout=partial(check_cache_layout, settings),
    )
    return create_model_engine(wanted, observer)


def _device_bytes(settings: EngineSettings) -> Callable[[], int] | None:
    """What tells the GPU memory of this process; None: it uses no GPU."""
    if settings.kind == "fake" or settings.accelerator != "nvidia":
        return None
    from workers.hardware.device import reserved_bytes  # noqa: PLC0415  as above: torch

    return partial(reserved_bytes, settings.device_index)


def _hello(settings: WorkerSettings) -> Hello:
    process = settings.process
    return Hello(PROTOCOL_VERSION, "worker", process.name, os.getpid(), process.config_hash)


if __name__ == "__main__":
    sys.exit(main())
