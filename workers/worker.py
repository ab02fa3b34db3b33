"""The engine worker's main loop: messages in, steps, token batches out."""

from __future__ import annotations

import logging
import time
from typing import assert_never

import msgspec
import numpy as np
import zmq

from hicache.manager.null import NO_PREFIX_CACHE, PrefixManager
from transport.child import StopFlag
from transport.framing import read_tokens
from transport.ids import DpRank
from transport.links.daemon import DaemonLink
from transport.links.router import RouterLink
from transport.messages.base import Hello, HelloAnswer
from transport.messages.control import CacheCommand
from transport.messages.from_daemon import WorkerNotice
from transport.messages.generate import Cancel, ModelInfo, Throttle
from transport.messages.to_daemon import CommandDone
from transport.messages.to_router import SequenceFailed, WorkerReady
from transport.messages.to_worker import Start, ToWorker
from transport.sockets import DealerSocket
from workers.contract import Engine
from workers.daemon_inbox import DaemonInbox
from workers.idle_check import IdleCheck
from workers.sampling.random_seed import choice_seed
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.scheduling.step import InFlightStep
from workers.telemetry import WorkerTelemetry
from workers.token_batches import token_batches

IDLE_SECONDS = 0.5
"""Longest wait between two checks for requests from the daemon."""
SHORT_POLL_MS = 1

log = logging.getLogger(__name__)


class Worker:
    """Drives one engine with one scheduler. Owns neither socket nor engine."""

    def __init__(
        self,
        rank: DpRank,
        engine: Engine,
        scheduler: Scheduler,
        router: DealerSocket[HelloAnswer | ToWorker],
        hello: Hello,
        inbox: DaemonInbox,
        daemon: DaemonLink[WorkerNotice],
        telemetry: WorkerTelemetry,
        prefixes: PrefixManager = NO_PREFIX_CACHE,
    ) -> None:
        self._rank = rank
        self._engine = engine
        self._scheduler = scheduler
        self._router: RouterLink[ToWorker] = RouterLink(router, hello, self, inbox.router_lost)
        self._inbox = inbox
        self._daemon = daemon
        self._telemetry = telemetry
        self._prefixes = prefixes

    def run(self, stop: StopFlag, idle_seconds: float) -> None:
        """Serve until `stop` is set.

        Raises:
            RouterRefusedError: the router does not accept this worker.
            EngineError: the device failed.
            PrefixLoadError: the device refuses to load what a step counts on.
        """
        poller = zmq.Poller()
        poller.register(stop.fd, zmq.POLLIN)
        self._router.connect(poller)
        idle_check = IdleCheck([self._scheduler.check_integrity, self._prefixes.check_integrity])
        while not stop.is_set():
            self._router.turn()
            while (command := self._inbox.take_command()) is not None:
                self._carry_out(command)
            worked = self._step()
            worked = self._prefixes.tick() or worked
            self._daemon.tick()
            if worked:
                idle_check.busy()
                continue
            self._telemetry.update(self._scheduler)
            if not poller.poll(self._idle_ms(idle_seconds)):
                idle_check.quiet()

    def _carry_out(self, command: CacheCommand) -> None:
        content = self._prefixes.carry_out(command.action)
        self._daemon.post(CommandDone(command.serial), msgspec.json.encode(content))

    def _idle_ms(self, idle_seconds: float) -> int:
        """How long to wait for messages.

        The wait is short while copies are under way or the router does not read, since neither wakes us
        when it ends.
        """
        if self._router.has_unsent or self._prefixes.transfers.num_open:
            return SHORT_POLL_MS
        return round(min(idle_seconds, IDLE_SECONDS) * 1000)

    # ---- what the router says ----

    def on_welcome(self) -> None:
        self._router.send(self._ready())
        self._daemon.set_state("ready")

    def on_router_lost(self) -> None:
        self._scheduler.cancel_all()
        self._daemon.set_state("loading", "joining the new router")

    def on_message(self, message: ToWorker, frames: list[zmq.Frame]) -> None:
        match message:
            case Start() as start:
                self._start(start, frames)
            case Cancel(request_id, index, _):
                self._scheduler.cancel(request_id, index)
            case Throttle(request_id, index, paused):
                self._scheduler.throttle(request_id, index, paused)
            case other:
                assert_never(other)

    def _ready(self) -> WorkerReady:
        info = self._engine.info
        model = ModelInfo(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            pool_tokens=self._scheduler.blocks.max_tokens_of_one,
        )
        return WorkerReady(self._rank, model, info.max_num_seqs)

    def _start(self, start: Start, frames: list[zmq.Frame]) -> None:
        # The frame's memory belongs to the message: keep a copy for as long as the sequence lives.
        prompt = np.array(read_tokens(frames[0]), dtype=np.int32)
        sequence = Sequence(
            key=(start.request_id, start.index),
            frontend=start.frontend,
            prompt=prompt,
            prompt_len=start.prompt_len,
            generate=start.generate,
            seed=choice_seed(start.generate.sampling.seed, start.index),
            arrival=start.arrival,
        )
        try:
            self._scheduler.add(sequence)
        except ValueError as error:
            log.warning("refused %s: %s", start.request_id, error)
            failed = SequenceFailed(
                start.request_id, start.index, 400, "context_length_exceeded", str(error)
            )
            self._router.send(failed)

    def _step(self) -> bool:
        """Launch what can be launched and collect what must be collected.

        Returns False if there was nothing to do, or if the router does not read: output that it does not take
        could only be lost.
        """
        if not self._router.flush():
            return False
        step = self._scheduler.next_step()
        if step is not None:
            self._launch(step)
        depth = self._engine.info.pipeline_depth if step is not None else 0
        if self._scheduler.num_in_flight <= depth:
            return step is not None
        self._collect()
        return True

    def _launch(self, step: InFlightStep) -> None:
        step.launched_at = time.monotonic()
        self._prefixes.transfers.load(step.plan.loads, step.plan.written_pages)
        step.launched = self._engine.launch(step.plan)
        self._prefixes.transfers.store(step.plan.stores)

    def _collect(self) -> None:
        output = self._scheduler.collect()
        for batch, frames in token_batches(output):
            self._router.send(batch, *frames)
        seconds = time.monotonic() - output.step.launched_at
        self._telemetry.observe_step(output.step.plan.is_prompt, seconds)
        self._telemetry.update(self._scheduler)
