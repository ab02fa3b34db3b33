"""The engine worker's main loop: messages in, steps, token batches out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import zmq

from hicache.manager.null import NO_PREFIX_CACHE, PrefixManager
from transport.child import StopFlag
from transport.framing import BadMessage, read_tokens, token_frame
from transport.ids import DpRank, ProcessName, RequestId
from transport.links.daemon import DaemonLink, RouterRefusedError
from transport.messages.base import Hello, Message, Refused, Welcome
from transport.messages.control import CacheCommand, CommandDone
from transport.messages.generate import Cancel, ModelInfo, Throttle, TokenBatch
from transport.messages.to_router import SequenceFailed, WorkerReady
from transport.messages.to_worker import Start
from transport.sockets import DealerSocket, Received
from transport.telemetry.metrics import MetricSet
from workers.contract import Engine, EngineInfo
from workers.daemon_inbox import DaemonInbox
from workers.idle_check import IdleCheck
from workers.sampling.random_seed import choice_seed
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.scheduling.step import InFlightStep, StepOutput, TokenRow

DEVICE_SECONDS = 1.0
"""Time between two looks at the device's memory."""
IDLE_SECONDS = 0.5
"""Longest wait without a look at what the daemon asks."""
SHORT_POLL_MS = 1

log = logging.getLogger(__name__)


class WorkerTelemetry:
    """Gauges and counters of one rank."""

    def __init__(
        self, metrics: MetricSet, info: EngineInfo, device_bytes: Callable[[], int] | None = None
    ) -> None:
        """`device_bytes` tells how much of its GPU this process has taken; None: it uses none."""
        self._device_bytes = device_bytes
        self._device_bytes_due = 0.0
        if device_bytes is not None:
            self._device_memory = metrics.gauge("gpu_memory_bytes")
        self._running_queue = metrics.queue("sequences with a slot", info.max_num_seqs)
        self._waiting_queue = metrics.queue("waiting sequences", 0)
        self._running = metrics.gauge("num_requests_running")
        self._waiting = metrics.gauge("num_requests_waiting")
        self._usage = metrics.gauge("kv_cache_usage_perc")
        self._pages_used = metrics.gauge("kv_pages_used")
        self._pages_total = metrics.gauge("kv_pages")
        self._slots_used = metrics.gauge("sequence_slots_used")
        self._slots_total = metrics.gauge("sequence_slots")
        self._preemptions = metrics.counter("num_preemptions")
        self._prefilled = metrics.counter("prefill_tokens_computed")
        self._generated = metrics.counter("decode_tokens_computed")
        self._prompt_steps = metrics.counter("engine_steps", "prompt")
        self._decode_steps = metrics.counter("engine_steps", "decode")
        self._prompt_seconds = metrics.histogram("engine_step_seconds", "prompt")
        self._decode_seconds = metrics.histogram("engine_step_seconds", "decode")
        self._pages_total.set(info.num_pages)
        self._slots_total.set(info.max_num_seqs)

    def update(self, scheduler: Scheduler) -> None:
        blocks = scheduler.blocks
        self._running.set(scheduler.num_running)
        self._waiting.set(scheduler.num_waiting)
        self._running_queue.set(scheduler.num_running)
        self._waiting_queue.set(scheduler.num_waiting)
        self._usage.set(blocks.pages_used / blocks.num_pages)
        self._pages_used.set(blocks.pages_used)
        self._slots_used.set(blocks.slots_used)
        counts = scheduler.counts
        self._preemptions.value = counts.preemptions
        self._prefilled.value = counts.prompt_tokens
        self._generated.value = counts.generated_tokens
        self._prompt_steps.value = counts.prompt_steps
        self._decode_steps.value = counts.decode_steps
        if self._device_bytes is not None:
            self._measure_device(self._device_bytes, time.monotonic())

    def _measure_device(self, device_bytes: Callable[[], int], now: float) -> None:
        # The allocator's statistics cost more than the rest of a turn: not at every step.
        if now >= self._device_bytes_due:
            self._device_bytes_due = now + DEVICE_SECONDS
            self._device_memory.set(device_bytes())

    def observe_step(self, is_prompt: bool, seconds: float) -> None:
        (self._prompt_seconds if is_prompt else self._decode_seconds).observe(seconds)


class Worker:
    """Drives one engine with one scheduler. Owns neither socket nor engine."""

    def __init__(
        self,
        rank: DpRank,
        engine: Engine,
        scheduler: Scheduler,
        dealer: DealerSocket,
        link: DaemonLink,
        telemetry: WorkerTelemetry,
        prefixes: PrefixManager = NO_PREFIX_CACHE,
    ) -> None:
        self._rank = rank
        self._engine = engine
        self._scheduler = scheduler
        self._dealer = dealer
        self._link = link
        self._telemetry = telemetry
        self._prefixes = prefixes
        self._unsent: deque[tuple[Message, tuple[memoryview, ...]]] = deque()
        """What the router has not taken yet, in order."""

    def run(self, stop: StopFlag, hello: Hello, inbox: DaemonInbox, idle_seconds: float) -> None:
        """Serve until `stop` is set.

        Raises:
            RouterRefusedError: the router does not take this worker.
            EngineError: the device failed.
        """
        poller = zmq.Poller()
        poller.register(self._dealer.socket, zmq.POLLIN)
        poller.register(stop.fd, zmq.POLLIN)
        self._send(hello)
        idle_check = IdleCheck([self._scheduler.check_integrity, self._prefixes.check_integrity])
        while not stop.is_set():
            if inbox.router_lost.is_set():
                inbox.router_lost.clear()
                self._scheduler.cancel_all()
                self._unsent.clear()
                self._link.set_state("loading", "joining the new router")
                self._send(hello)
            self._receive()
            while (command := inbox.take_command()) is not None:
                self._carry_out(command)
            worked = self._step()
            worked = self._prefixes.tick() or worked
            self._link.tick()
            if worked:
                idle_check.busy()
                continue
            self._telemetry.update(self._scheduler)
            if not poller.poll(self._idle_ms(idle_seconds)):
                idle_check.quiet()

    def _carry_out(self, command: CacheCommand) -> None:
        content = self._prefixes.carry_out(command.action)
        self._link.post(CommandDone(command.serial), msgspec.json.encode(content))

    def _idle_ms(self, idle_seconds: float) -> int:
        """How long to wait for messages: shortly while copies are under way or the router does not
        read, the ends of which wake nobody."""
        if self._unsent or self._prefixes.transfers.num_open:
            return SHORT_POLL_MS
        return round(min(idle_seconds, IDLE_SECONDS) * 1000)

    def _receive(self) -> None:
        try:
            for received in self._dealer.drain():
                self._handle(received)
        except BadMessage:
            log.exception("dropped a message that cannot be decoded")

    def _handle(self, received: Received) -> None:
        match received.message:
            case Start() as start:
                self._start(start, received)
            case Cancel(request_id, index, _):
                self._scheduler.cancel(request_id, index)
            case Throttle(request_id, index, paused):
                self._scheduler.throttle(request_id, index, paused)
            case Welcome():
                self._send(self._ready())
                self._link.set_state("ready")
            case Refused(reason):
                raise RouterRefusedError(f"the router refused this worker: {reason}")
            case other:
                log.warning("ignored a %s", type(other).__name__)

    def _ready(self) -> WorkerReady:
        info = self._engine.info
        model = ModelInfo(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
            pool_tokens=self._scheduler.blocks.max_tokens_of_one,
        )
        return WorkerReady(self._rank, model, info.max_num_seqs)

    def _start(self, start: Start, received: Received) -> None:
        # The frame's memory belongs to the message: keep a copy for as long as the sequence lives.
        prompt = np.array(read_tokens(received.frames[0]), dtype=np.int32)
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
            self._send(failed)

    def _step(self) -> bool:
        """Launch what can be launched, collect what has to be. False: there was nothing to do, or
        the router does not read: what it does not take could only be lost."""
        if not self._flush():
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
        self._prefixes.transfers.load(step.plan.loads, step.plan.written_pages())
        step.launched = self._engine.launch(step.plan)
        self._prefixes.transfers.store(step.plan.stores)

    def _collect(self) -> None:
        output = self._scheduler.collect()
        self._send_tokens(output)
        seconds = time.monotonic() - output.step.launched_at
        self._telemetry.observe_step(output.step.plan.is_prompt, seconds)
        self._telemetry.update(self._scheduler)

    def _send_tokens(self, output: StepOutput) -> None:
        frontends: dict[ProcessName, tuple[list[TokenRow], list[Sequence]]] = {}
        for row in output.rows:
            frontend = row.sequence.frontend
            if frontend not in frontends:
                frontends[frontend] = ([], [])
            frontends[frontend][0].append(row)
        for sequence in output.step.started:
            frontends.setdefault(sequence.frontend, ([], []))[1].append(sequence)
        for frontend, (rows, started) in frontends.items():
            batch, frames = token_batch(frontend, output.step.plan.step, rows, started)
            self._send(batch, *frames)

    def _send(self, message: Message, *frames: memoryview) -> None:
        """Send to the router, as soon as it takes it."""
        was_blocked = bool(self._unsent)
        self._unsent.append((message, frames))
        if not self._flush() and not was_blocked:
            log.warning("the router does not read: this worker waits for it")

    def _flush(self) -> bool:
        """Send what is unsent; whether all of it could be."""
        while self._unsent and self._dealer.can_send:
            message, frames = self._unsent[0]
            if not self._dealer.send(message, *frames):
                break
            self._unsent.popleft()
        return not self._unsent


def token_batch(
    frontend: ProcessName, step: int, rows: list[TokenRow], started: Iterable[Sequence]
) -> tuple[TokenBatch, list[memoryview]]:
    """One step's rows for one frontend as a message and its frames (see `TokenBatch`)."""
    request_ids: list[RequestId] = [row.sequence.key[0] for row in rows]
    wanted = [row.sequence.sampling.logprobs for row in rows]
    with_logprobs = any(count >= 0 for count in wanted)
    batch = TokenBatch(
        frontend=frontend,
        step=step,
        request_ids=request_ids,
        indexes=[row.sequence.key[1] for row in rows],
        counts=[1] * len(rows),
        finish=[row.finish for row in rows],
        logprobs=wanted if with_logprobs else [],
        started=[(s.key[0], s.key[1], s.prefix.cached_tokens, s.prompt_len) for s in started],
    )
    frames = [token_frame([row.token for row in rows])]
    if with_logprobs:
        frames.append(_logprob_frame(rows))
    return batch, frames


def _logprob_frame(rows: list[TokenRow]) -> memoryview:
    words: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for row in rows:
        count = row.sequence.sampling.logprobs
        if count < 0:
            continue
        record = np.empty(1 + 2 * count, dtype="<i4")
        found = row.logprobs
        if found is None:
            raise ValueError(f"the engine returned no logprobs for {row.sequence.key}")
        record[:1].view("<f4")[0] = found.chosen
        record[1 : 1 + count] = found.top_ids[:count]
        record[1 + count :].view("<f4")[:] = found.top_logprobs[:count]
        words.append(record)
    return np.concatenate(words).data.cast("B")
