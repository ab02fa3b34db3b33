"""The router's rules: messages and losses in, messages out. No sockets and no clock in here.

A prompt is `received`, then `tokenizing` at one tokenizer, `queued` at one worker, `running` from
its first chunk on, and `finished`. The router keeps the prompt and the tokens that the client has
until the end, so that a request can go on elsewhere when its tokenizer or worker is lost.

A prompt for which no tokenizer has room stays `received`. A suspect (`trials.py`) that no process may
be given now stays `received` or `queued`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from daemon.router.admission import Admission
from daemon.router.generation import Generation, Stage
from daemon.router.metrics import RouterMetrics
from daemon.router.outbox import Outgoing
from daemon.router.peers import Peers
from daemon.router.placement import choose
from daemon.router.prompt_check import find_problem, fit
from daemon.router.settings import RouterSettings
from daemon.router.trials import TOKENS_TO_CLEAR, Trials
from transport.framing import Payload, read_tokens
from transport.ids import NO_RANK, DpRank, ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import (
    ALL_CHOICES,
    RUNNING,
    Cancel,
    CancelCause,
    Encode,
    Encoded,
    RequestFailed,
    Throttle,
    TokenBatch,
)
from transport.messages.telemetry import RequestRow
from transport.messages.to_frontend import Finished, Serving
from transport.messages.to_router import SequenceFailed, Submit, WorkerReady
from transport.prompt_turns import PromptTurns
from transport.sockets import Received

MAX_ROWS: Final = 1000


class RouterCore:
    """State of all requests. Every method returns what has to be sent, in order."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._generations: dict[RequestId, Generation] = {}
        self._admission = Admission(settings)
        self._peers = Peers(settings)
        self._trials = Trials(settings.max_migrations)
        self._held_prompts: PromptTurns[Generation] = PromptTurns()
        """No tokenizer has room for them now, or they are suspects."""
        self._held_suspects: PromptTurns[Generation] = PromptTurns()
        """No worker may be given them now."""
        self._out: list[Outgoing] = []

    # ---- peers -----------------------------------------------------------------------------------

    def peer_joined(self, peer: ProcessName, role: str, now: float) -> list[Outgoing]:
        """A frontend or tokenizer has said hello (a worker joins with `WorkerReady`)."""
        if role == "frontend":
            self._peers.frontends.add(peer)
            if self._peers.model is not None:
                self._send(peer, Serving(self._peers.model))
        elif role == "tokenizer":
            self._peers.tokenizer_joined(peer)
            for generation in self._in_stage("received"):
                self._enter(generation, "received", now)  # what it waits for from now on is room
                self._to_tokenizer(generation, now)
        return self._take()

    def worker_ready(self, peer: ProcessName, ready: WorkerReady) -> list[Outgoing]:
        self._peers.worker_ready(peer, ready)
        self._tell_model()
        for generation in self._in_stage("queued"):
            if generation.rank == NO_RANK:
                self._to_worker(generation)
        return self._take()

    def peer_lost(self, peer: ProcessName, now: float, comes_back: bool = True) -> list[Outgoing]:
        """A process is gone: its requests are resubmitted elsewhere, a frontend's are dropped.
        `comes_back`: another process of this name is started."""
        peers = self._peers
        peers.note_loss(peer, comes_back)
        if peer in peers.frontends:
            peers.frontends.discard(peer)
            for generation in [g for g in self._generations.values() if g.frontend == peer]:
                self._cancel_all(generation, "client")
        elif peer in peers.tokenizers.prompts:
            self._tokenizer_lost(peer, now)
        elif peer in peers.ranks:
            self._worker_lost(peers.ranks[peer], now)
        return self._take()

    def _tokenizer_lost(self, peer: ProcessName, now: float) -> None:
        self._peers.tokenizers.lost(peer)
        sharing = [g for g in self._in_stage("tokenizing") if g.tokenizer == peer]
        given_up = self._trials.process_lost(peer, sharing)
        for generation in sharing:
            generation.tokenizer = None
        for generation in sharing:
            if generation in given_up:
                self._give_up(generation, "tokenizer")
            else:
                self._to_tokenizer(generation, now)

    def _worker_lost(self, rank: DpRank, now: float) -> None:
        peer = self._peers.names[rank]
        if self._peers.rank_lost(rank):
            self._tell_model()
        sharing = [g for g in self._generations.values() if g.rank == rank]
        given_up = self._trials.process_lost(peer, sharing)
        for generation in sharing:
            generation.rank = NO_RANK
        for generation in sharing:
            if generation in given_up:
                self._give_up(generation, "worker")
            else:
                self._metrics.migrations.add()
                self._enter(generation, "queued", now)
                self._to_worker(generation)

    def _give_up(self, generation: Generation, role: str) -> None:
        self._fail(
            generation, 500, f"{role}_lost",
            f"The request was given up after it had lost {generation.losses} {role}s.",
        )  # fmt: skip

    def _tell_model(self) -> None:
        for frontend in self._peers.frontends:
            assert self._peers.model is not None
            self._send(frontend, Serving(self._peers.model))

    # ---- from frontends ---------------------------------------------------------------------------

    def submit(
        self, peer: ProcessName, message: Submit | Encode, frame: Payload, now: float
    ) -> list[Outgoing]:
        """A prompt to answer, or (`Encode`) to render and encode only."""
        generation = Generation.of(message, peer, frame, now)
        generation.enter("received", now)
        refusal = self._refusal(generation)
        if refusal is not None:
            self._metrics.rejections(refusal.code).add()
            self._send(generation.frontend, refusal)
            return self._take()
        self._generations[generation.request_id] = generation
        self._admission.count(generation, prompts=1, waiting=1)
        self._metrics.update_waiting(self._admission)
        if message.kind == "tokens":
            self._encoded(generation, generation.prompt_frame, now)
        else:
            self._to_tokenizer(generation, now)
        return self._take()

    def _refusal(self, generation: Generation) -> RequestFailed | None:
        if generation.request_id in self._generations:
            message = "The request id is in use."
            return RequestFailed(generation.request_id, 409, "duplicate_request_id", message)
        peers = self._peers
        comes = bool(peers.loads) or peers.max_wait("worker") > 0
        return self._admission.refusal(generation, peers.model is not None and comes)

    def cancel(self, message: Cancel, now: float) -> list[Outgoing]:
        generation = self._generations.get(message.request_id)
        if generation is None:
            return []
        if message.index == ALL_CHOICES:
            self._cancel_all(generation, message.cause)
        elif 0 <= message.index < len(generation.choices):
            if generation.rank != NO_RANK:
                self._send(self._peers.names[generation.rank], message)
            self._choice_done(generation, message.index)
            self._close_if_done(generation, now)
        return self._take()

    def throttle(self, message: Throttle) -> list[Outgoing]:
        generation = self._generations.get(message.request_id)
        if generation is not None and 0 <= message.index < len(generation.choices):
            # Noted as well: where it goes on after a loss it must pause again.
            generation.choices[message.index].paused = message.paused
            if generation.is_paused:
                self._end_trial(generation)
            if generation.rank != NO_RANK:
                self._send(self._peers.names[generation.rank], message)
        return self._take()

    def drain(self) -> None:
        self._admission.drain()

    # ---- from tokenizers -----------------------------------------------------------------------------

    def encoded(
        self, peer: ProcessName, message: Encoded, frame: Payload, now: float
    ) -> list[Outgoing]:
        generation = self._left_tokenizer(peer, message.request_id)
        if generation is not None:
            self._metrics.render_seconds.observe(message.render_seconds)
            self._metrics.encode_seconds.observe(message.encode_seconds)
            self._encoded(generation, frame, now)
        self._place_held(now)
        return self._take()

    def encoding_failed(
        self, peer: ProcessName, message: RequestFailed, now: float
    ) -> list[Outgoing]:
        """A prompt cannot be encoded, or is no longer held by the tokenizer since it was cancelled."""
        generation = self._left_tokenizer(peer, message.request_id)
        if generation is not None:
            self._send(generation.frontend, message)
            self._close(generation)
        self._place_held(now)
        return self._take()

    def _left_tokenizer(self, peer: ProcessName, request_id: RequestId) -> Generation | None:
        self._peers.tokenizers.answered(peer, request_id)
        generation = self._generations.get(request_id)
        if generation is None or generation.stage != "tokenizing" or generation.tokenizer != peer:
            return None
        self._cleared(generation)
        self._peers.tokenizers.take_back(peer)
        generation.tokenizer = None
        return generation

    def _encoded(self, generation: Generation, frame: Payload, now: float) -> None:
        message = generation.message
        if isinstance(message, Encode):
            self._send(generation.frontend, Encoded(generation.request_id), frame)
            self._close(generation)
            return
        prompt = np.array(read_tokens(frame), dtype=np.int32)
        generation.prompt_frame = b""
        model = self._peers.model
        assert model is not None  # else it would not have been let in
        problem = find_problem(message.kind, prompt, model)
        if problem is not None:
            self._fail(generation, 400, problem.code, problem.message, problem.param)
            return
        generation.message = fit(message, len(prompt), model)
        generation.prompt = prompt
        self._enter(generation, "queued", now)
        self._to_worker(generation)

    # ---- from workers -------------------------------------------------------------------------------

    def tokens(
        self, peer: ProcessName, batch: TokenBatch, received: Received[Message], now: float
    ) -> list[Outgoing]:
        rank = self._peers.ranks.get(peer, NO_RANK)
        if rank == NO_RANK:
            return []  # a worker that has been given up: its requests run elsewhere
        for request_id, _index, _cached, _prompt in batch.started:
            generation = self._generations.get(request_id)
            if generation is not None and generation.stage == "queued" and generation.rank == rank:
                self._enter(generation, "running", now)
                self._metrics.queue_seconds.observe(now - generation.queued_at)
        if batch.frontend in self._peers.frontends:
            self._out.append(Outgoing(batch.frontend, None, forward=received))
        ids = read_tokens(received.frames[0]).tolist()
        position = 0
        closing: list[Generation] = []
        for i, request_id in enumerate(batch.request_ids):
            count = batch.counts[i]
            generation = self._generations.get(request_id)
            if generation is not None and generation.rank == rank:
                index = batch.indexes[i]
                output = generation.choices[index].output
                if count == 1:  # the usual case, and the hot path
                    output.append(ids[position])
                else:
                    output += ids[position : position + count]
                if generation.losses:
                    generation.tokens_on_trial += count
                    if generation.tokens_on_trial >= TOKENS_TO_CLEAR:
                        self._cleared(generation)
                if batch.finish[i] != RUNNING:
                    self._choice_done(generation, index)
                    closing.append(generation)
            position += count
        for generation in closing:
            self._close_if_done(generation, now)
        self._place_held(now)
        return self._take()

    def tokens_lost(self, batch: TokenBatch) -> list[Outgoing]:
        """One step's tokens could not be sent: their requests end, rather than go on with a hole."""
        for request_id in {*batch.request_ids, *(row[0] for row in batch.started)}:
            generation = self._generations.get(request_id)
            if generation is not None:
                self._fail(
                    generation, 500, "tokens_lost",
                    "The request was given up: the server could not pass its answer on.",
                )  # fmt: skip
        return self._take()

    def sequence_failed(self, peer: ProcessName, message: SequenceFailed) -> list[Outgoing]:
        generation = self._generations.get(message.request_id)
        # A worker that has been given up may still speak of a request that runs elsewhere by now.
        if generation is not None and generation.rank == self._peers.ranks.get(peer):
            self._fail(generation, message.status, message.code, message.message)
        return self._take()

    # ---- time ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Outgoing]:
        """Fail what has been in the hands of no worker for too long; refresh the gauges."""
        for generation in list(self._generations.values()):
            self._check_wait(generation, now)
        self._metrics.update(self._generations.values())
        self._metrics.update_waiting(self._admission)
        choices = {self._peers.names[rank]: load for rank, load in self._peers.loads.items()}
        self._metrics.update_outstanding(self._peers.tokenizers.prompts, choices)
        self._place_held(now)
        return self._take()

    def _check_wait(self, generation: Generation, now: float) -> None:
        peers = self._peers
        if generation.stage == "tokenizing" or (
            generation.stage == "received" and peers.tokenizers.prompts
        ):
            limit, where = self._settings.stage_seconds, "the tokenizer"
        elif generation.stage == "received":
            limit, where = peers.max_wait("tokenizer"), "a tokenizer"
        elif generation.rank == NO_RANK and not peers.loads:
            limit, where = peers.max_wait("worker"), "a worker"
        else:
            return
        if not limit:
            message = f"There is no longer {where} that could take the request."
            self._fail(generation, 503, "not_ready", message)
        elif now - generation.stage_since > limit:
            message = f"The request waited {limit:g} s for {where}."
            self._fail(generation, 503, "timeout", message)

    # ---- steps of a request -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    def rows(self) -> list[RequestRow]:
        return [generation.row() for generation in list(self._generations.values())[:MAX_ROWS]]

    def _enter(self, generation: Generation, stage: Stage, now: float) -> None:
        was_waiting = generation.is_waiting
        generation.enter(stage, now)
        self._admission.count(generation, waiting=generation.is_waiting - was_waiting)

    def _to_tokenizer(self, generation: Generation, now: float) -> None:
        self._held_prompts.pop(generation.request_id)
        tokenizers = self._peers.tokenizers
        name = tokenizers.choose(generation, lambda name: self._trials.takes(name, generation))
        if name is None:
            if generation.stage != "received":
                self._enter(generation, "received", now)
            if tokenizers.prompts:
                self._hold(self._held_prompts, generation)
            return
        tokenizers.give(name, generation)
        self._trials.begin(name, generation)
        self._metrics.prompts_at(name, tokenizers.prompts[name])
        generation.tokenizer = name
        self._enter(generation, "tokenizing", now)
        self._send(name, generation.encode(), generation.prompt_frame)

    def _to_worker(self, generation: Generation) -> None:
        self._held_suspects.pop(generation.request_id)
        peers = self._peers
        if not peers.loads:
            return  # placed when a worker gets ready, or failed by `tick`
        loads = {
            rank: load
            for rank, load in peers.loads.items()
            if self._trials.takes(peers.names[rank], generation)
        }
        if not loads:
            self._hold(self._held_suspects, generation)
            return
        affinity = generation.message.affinity if self._settings.routing == "affinity" else ""
        rank, overloaded = choose(affinity, loads)
        if overloaded:
            self._metrics.affinity_passed_over.add()
        generation.rank = rank
        loads = peers.loads
        loads[rank] += generation.open_choices
        self._trials.begin(peers.names[rank], generation)
        name = self._peers.names[rank]
        self._metrics.choices_at(name, loads[rank])
        for index, choice in enumerate(generation.choices):
            if not choice.done:
                self._send(name, generation.start(index), generation.tokens_so_far(index))
                if choice.paused:
                    self._send(name, Throttle(generation.request_id, index, True))

    def _hold(self, held: PromptTurns[Generation], generation: Generation) -> None:
        arrived, size = generation.received_at, generation.prompt_bytes
        held.add(generation.request_id, generation, arrived, size)

    def _place_held(self, now: float) -> None:
        """Place those whose turn it is, until one finds no place."""
        while (generation := self._held_prompts.first()) is not None:
            self._to_tokenizer(generation, now)
            if generation.tokenizer is None:
                break
        while (generation := self._held_suspects.first()) is not None:
            self._to_worker(generation)
            if generation.rank == NO_RANK:
                break

    def _cleared(self, generation: Generation) -> None:
        self._end_trial(generation)
        generation.losses = 0

    def _end_trial(self, generation: Generation) -> None:
        if generation.losses:
            at = generation.tokenizer or self._peers.names.get(generation.rank)
            if at is not None:
                self._trials.end(at, generation)

    def _choice_done(self, generation: Generation, index: int) -> None:
        choice = generation.choices[index]
        if not choice.done:
            choice.done = True
            if generation.rank in self._peers.loads:
                self._peers.loads[generation.rank] -= 1

    def _close_if_done(self, generation: Generation, now: float) -> None:
        if generation.open_choices or generation.request_id not in self._generations:
            return
        stages = generation.stage_times(finished=now)
        self._send(generation.frontend, Finished(generation.request_id, stages, generation.rank))
        self._close(generation)

    def _cancel_all(self, generation: Generation, cause: CancelCause) -> None:
        at = generation.tokenizer or self._peers.names.get(generation.rank)
        if at is not None:
            self._send(at, Cancel(generation.request_id, ALL_CHOICES, cause))
        self._close(generation)

    def _fail(
        self, generation: Generation, status: int, code: str, message: str, param: str | None = None
    ) -> None:
        retry_after = self._settings.retry_after_seconds if status in (429, 503) else None
        self._send(
            generation.frontend,
            RequestFailed(generation.request_id, status, code, message, param, retry_after),
        )
        self._cancel_all(generation, "failed")

    def _close(self, generation: Generation) -> None:
        self._end_trial(generation)
        self._held_suspects.pop(generation.request_id)
        self._held_prompts.pop(generation.request_id)
        if generation.tokenizer is not None:
            self._peers.tokenizers.take_back(generation.tokenizer)
        for index in range(len(generation.choices)):
            self._choice_done(generation, index)
        self._admission.count(generation, prompts=-1, waiting=-generation.is_waiting)
        generation.stage = "finished"
        del self._generations[generation.request_id]

    # ---- plumbing ------------------------------------------------------------------------------------------

    def _in_stage(self, stage: Stage) -> list[Generation]:
        return [
            generation for generation in self._generations.values() if generation.stage == stage
        ]

    def _send(self, peer: ProcessName, message: Message, *frames: Payload) -> None:
        self._out.append(Outgoing(peer, message, frames))

    def _take(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out

    def check_integrity(self) -> None:
        """Compare what is counted with the requests.

        Raises:
            AssertionError: they disagree.
        """
        for rank, load in self._peers.loads.items():
            wanted = sum(g.open_choices for g in self._generations.values() if g.rank == rank)
            if load != wanted:
                raise AssertionError(f"rank {rank} counts {load} choices, has {wanted}")
        for name, load in self._peers.tokenizers.prompts.items():
            wanted = sum(g.tokenizer == name for g in self._generations.values())
            if load != wanted:
                raise AssertionError(f"{name} counts {load} prompts, has {wanted}")
        self._admission.check_integrity(self._generations.values())
