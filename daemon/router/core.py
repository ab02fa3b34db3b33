"""The router's rules: messages and losses in, messages out. No sockets and no clock in here.

A request is `received`, then `tokenizing` at one tokenizer, `queued` at one worker, `running` from
its first chunk on, and `finished`. The router keeps the prompt and the tokens that the client has
until the end, so that a request can go on elsewhere when its tokenizer or worker is lost.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from daemon.router.admission import Admission
from daemon.router.metrics import RouterMetrics
from daemon.router.outbox import Outgoing
from daemon.router.placement import choose_rank, choose_tokenizer
from daemon.router.prompt_check import find_problem, fit
from daemon.router.request import Choice, Request, Stage
from daemon.router.roster import Roster
from daemon.router.settings import RouterSettings
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
from transport.sockets import Received

MAX_ROWS: Final = 1000


class RouterCore:
    """State of all requests. Every method returns what has to be sent, in order."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._requests: dict[RequestId, Request] = {}
        self._admission = Admission(settings)
        self._roster = Roster(settings)
        self._out: list[Outgoing] = []

    # ---- peers -----------------------------------------------------------------------------------

    def peer_joined(self, peer: ProcessName, role: str, now: float) -> list[Outgoing]:
        """A frontend or tokenizer has said hello (a worker joins with `WorkerReady`)."""
        if role == "frontend":
            self._roster.frontends.add(peer)
            if self._roster.model is not None:
                self._send(peer, Serving(self._roster.model))
        elif role == "tokenizer":
            self._roster.tokenizer_joined(peer)
            for request in self._in_stage("received"):
                self._to_tokenizer(request, now)
        return self._take()

    def worker_ready(self, peer: ProcessName, ready: WorkerReady) -> list[Outgoing]:
        self._roster.worker_ready(peer, ready)
        self._tell_model()
        for request in self._in_stage("queued"):
            if request.rank == NO_RANK:
                self._to_worker(request)
        return self._take()

    def peer_lost(self, peer: ProcessName, now: float, comes_back: bool = True) -> list[Outgoing]:
        """A process is gone: its requests are resubmitted elsewhere, a frontend's are dropped.
        `comes_back`: another process of this name is started."""
        roster = self._roster
        roster.note_loss(peer, comes_back)
        if peer in roster.frontends:
            roster.frontends.discard(peer)
            for request in [r for r in self._requests.values() if r.frontend == peer]:
                self._cancel_all(request, "client")
        elif peer in roster.tokenizers:
            del roster.tokenizers[peer]
            for request in [r for r in self._in_stage("tokenizing") if r.tokenizer == peer]:
                request.tokenizer = None
                self._to_tokenizer(request, now)
        elif peer in roster.ranks:
            self._worker_lost(roster.ranks[peer], now)
        return self._take()

    def _worker_lost(self, rank: DpRank, now: float) -> None:
        if self._roster.rank_lost(rank):
            self._tell_model()
        for request in [r for r in self._requests.values() if r.rank == rank]:
            request.rank = NO_RANK
            request.migrations += 1
            if request.migrations > self._settings.max_migrations:
                self._fail(
                    request, 500, "worker_lost",
                    f"The request was given up after it had lost {request.migrations} workers.",
                )  # fmt: skip
                continue
            self._metrics.migrations.add()
            self._enter(request, "queued", now)
            self._to_worker(request)

    def _tell_model(self) -> None:
        for frontend in self._roster.frontends:
            assert self._roster.model is not None
            self._send(frontend, Serving(self._roster.model))

    # ---- from frontends ---------------------------------------------------------------------------

    def submit(
        self, peer: ProcessName, message: Submit, frame: Payload, now: float
    ) -> list[Outgoing]:
        request = Request(
            request_id=message.request_id,
            frontend=peer,
            kind=message.kind,
            generate=message.generate,
            choices=[Choice() for _ in range(message.n)],
            affinity=message.affinity,
            add_special_tokens=message.add_special_tokens,
            prompt_frame=frame,
            received_at=message.received_at,
            call=message.call or message.request_id,
        )
        return self._receive(request, now)

    def encode(
        self, peer: ProcessName, message: Encode, frame: Payload, now: float
    ) -> list[Outgoing]:
        """A prompt to render and encode only."""
        request = Request(
            request_id=message.request_id,
            frontend=peer,
            kind=message.kind,
            generate=None,
            choices=[],
            affinity=message.affinity,
            add_special_tokens=message.add_special_tokens,
            prompt_frame=frame,
            received_at=now,
            call=message.request_id,
        )
        return self._receive(request, now)

    def _receive(self, request: Request, now: float) -> list[Outgoing]:
        request.enter("received", now)
        refusal = self._refusal(request)
        if refusal is not None:
            self._metrics.rejections(refusal.code).add()
            self._send(request.frontend, refusal)
            return self._take()
        self._requests[request.request_id] = request
        self._admission.count(request, prompts=1, waiting=1)
        self._metrics.waiting.set(self.num_waiting)
        if request.kind == "tokens":
            self._encoded(request, request.prompt_frame, now)
        else:
            self._to_tokenizer(request, now)
        return self._take()

    def _refusal(self, request: Request) -> RequestFailed | None:
        if request.request_id in self._requests:
            message = "The request id is in use."
            return RequestFailed(request.request_id, 409, "duplicate_request_id", message)
        roster = self._roster
        comes = bool(roster.loads) or roster.patience("worker") > 0
        return self._admission.refusal(request, roster.model is not None and comes)

    def cancel(self, message: Cancel, now: float) -> list[Outgoing]:
        """The client has gone, a stop string was found, or the reader is too slow."""
        request = self._requests.get(message.request_id)
        if request is None:
            return []
        if message.index == ALL_CHOICES:
            self._cancel_all(request, message.cause)
        elif 0 <= message.index < len(request.choices):
            if request.rank != NO_RANK:
                self._send(self._roster.names[request.rank], message)
            self._choice_done(request, message.index)
            self._close_if_done(request, now)
        return self._take()

    def throttle(self, message: Throttle) -> list[Outgoing]:
        request = self._requests.get(message.request_id)
        if request is not None and 0 <= message.index < len(request.choices):
            # Noted as well: where it goes on after a loss it must pause again.
            request.choices[message.index].paused = message.paused
            if request.rank != NO_RANK:
                self._send(self._roster.names[request.rank], message)
        return self._take()

    def drain(self) -> None:
        self._admission.drain()

    # ---- from tokenizers -----------------------------------------------------------------------------

    def encoded(
        self, peer: ProcessName, message: Encoded, frame: Payload, now: float
    ) -> list[Outgoing]:
        request = self._left_tokenizer(peer, message.request_id)
        if request is not None:
            self._metrics.render_seconds.observe(message.render_seconds)
            self._metrics.encode_seconds.observe(message.encode_seconds)
            self._encoded(request, frame, now)
        return self._take()

    def encoding_failed(self, peer: ProcessName, message: RequestFailed) -> list[Outgoing]:
        request = self._left_tokenizer(peer, message.request_id)
        if request is not None:
            self._send(request.frontend, message)
            self._close(request)
        return self._take()

    def _left_tokenizer(self, peer: ProcessName, request_id: RequestId) -> Request | None:
        request = self._requests.get(request_id)
        if request is None or request.stage != "tokenizing" or request.tokenizer != peer:
            return None
        self._roster.tokenizers[peer] -= 1
        request.tokenizer = None
        return request

    def _encoded(self, request: Request, frame: Payload, now: float) -> None:
        if request.generate is None:
            self._send(request.frontend, Encoded(request.request_id), frame)
            self._close(request)
            return
        prompt = np.array(read_tokens(frame), dtype=np.int32)
        request.prompt_frame = b""
        model = self._roster.model
        assert model is not None  # else it would not have been let in
        problem = find_problem(request.kind, prompt, model)
        if problem is not None:
            self._fail(request, 400, problem.code, problem.message, problem.param)
            return
        request.generate = fit(request.generate, len(prompt), model)
        request.prompt = prompt
        self._enter(request, "queued", now)
        self._to_worker(request)

    # ---- from workers -------------------------------------------------------------------------------

    def tokens(
        self, peer: ProcessName, batch: TokenBatch, received: Received[Message], now: float
    ) -> list[Outgoing]:
        rank = self._roster.ranks.get(peer, NO_RANK)
        if rank == NO_RANK:
            return []  # a worker that has been given up: its requests run elsewhere
        for request_id, _index, _cached, _prompt in batch.started:
            request = self._requests.get(request_id)
            if request is not None and request.stage == "queued" and request.rank == rank:
                self._enter(request, "running", now)
                self._metrics.queue_seconds.observe(now - request.queued_at)
        if batch.frontend in self._roster.frontends:
            self._out.append(Outgoing(batch.frontend, None, forward=received))
        ids = read_tokens(received.frames[0]).tolist()
        position = 0
        closing: list[Request] = []
        for i, request_id in enumerate(batch.request_ids):
            count = batch.counts[i]
            request = self._requests.get(request_id)
            if request is not None and request.rank == rank:
                index = batch.indexes[i]
                output = request.choices[index].output
                if count == 1:  # the usual case, and the hot path
                    output.append(ids[position])
                else:
                    output += ids[position : position + count]
                if batch.finish[i] != RUNNING:
                    self._choice_done(request, index)
                    closing.append(request)
            position += count
        for request in closing:
            self._close_if_done(request, now)
        return self._take()

    def tokens_lost(self, batch: TokenBatch) -> list[Outgoing]:
        """One step's tokens could not be sent: their requests end, rather than go on with a hole."""
        for request_id in {*batch.request_ids, *(row[0] for row in batch.started)}:
            request = self._requests.get(request_id)
            if request is not None:
                self._fail(
                    request, 500, "tokens_lost",
                    "The request was given up: the server could not pass its answer on.",
                )  # fmt: skip
        return self._take()

    def sequence_failed(self, peer: ProcessName, message: SequenceFailed) -> list[Outgoing]:
        request = self._requests.get(message.request_id)
        # A worker that has been given up may still speak of a request that runs elsewhere by now.
        if request is not None and request.rank == self._roster.ranks.get(peer):
            self._fail(request, message.status, message.code, message.message)
        return self._take()

    # ---- time ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Outgoing]:
        """Fail what has been in the hands of no worker for too long; refresh the gauges."""
        for request in list(self._requests.values()):
            self._check_wait(request, now)
        self._metrics.update(self._requests.values())
        self._metrics.waiting.set(self.num_waiting)
        choices = {self._roster.names[rank]: load for rank, load in self._roster.loads.items()}
        self._metrics.update_outstanding(self._roster.tokenizers, choices)
        return self._take()

    def _check_wait(self, request: Request, now: float) -> None:
        if request.stage == "tokenizing":
            limit, where = self._settings.stage_seconds, "the tokenizer"
        elif request.stage == "received":
            limit, where = self._roster.patience("tokenizer"), "a tokenizer"
        elif request.rank == NO_RANK:
            limit, where = self._roster.patience("worker"), "a worker"
        else:
            return
        if not limit:
            message = f"There is no longer {where} that could take the request."
            self._fail(request, 503, "not_ready", message)
        elif now - request.stage_since > limit:
            message = f"The request waited {limit:g} s for {where}."
            self._fail(request, 503, "timeout", message)

    # ---- steps of a request -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """HTTP requests of which no worker has begun some prompt."""
        return self._admission.num_waiting

    def rows(self) -> list[RequestRow]:
        return [request.row() for request in list(self._requests.values())[:MAX_ROWS]]

    def _enter(self, request: Request, stage: Stage, now: float) -> None:
        was_waiting = request.is_waiting
        request.enter(stage, now)
        self._admission.count(request, waiting=request.is_waiting - was_waiting)

    def _to_tokenizer(self, request: Request, now: float) -> None:
        tokenizers = self._roster.tokenizers
        if not tokenizers:
            self._enter(request, "received", now)
            return
        name = choose_tokenizer(request.affinity, tokenizers)
        tokenizers[name] += 1
        self._metrics.prompts_at(name, tokenizers[name])
        request.tokenizer = name
        self._enter(request, "tokenizing", now)
        job = Encode(request.request_id, request.kind, request.add_special_tokens, request.affinity)
        self._send(name, job, request.prompt_frame)

    def _to_worker(self, request: Request) -> None:
        loads = self._roster.loads
        if not loads:
            return  # placed when a worker gets ready, or failed by `tick`
        rank, overloaded = choose_rank(self._settings.routing, request.affinity, loads)
        if overloaded:
            self._metrics.affinity_passed_over.add()
        request.rank = rank
        loads[rank] += request.open_choices
        name = self._roster.names[rank]
        self._metrics.choices_at(name, loads[rank])
        for index, choice in enumerate(request.choices):
            if not choice.done:
                self._send(name, request.start(index), request.tokens_so_far(index))
                if choice.paused:
                    self._send(name, Throttle(request.request_id, index, True))

    def _choice_done(self, request: Request, index: int) -> None:
        choice = request.choices[index]
        if not choice.done:
            choice.done = True
            if request.rank in self._roster.loads:
                self._roster.loads[request.rank] -= 1

    def _close_if_done(self, request: Request, now: float) -> None:
        if request.open_choices or request.request_id not in self._requests:
            return
        stages = request.stage_times(finished=now)
        self._send(request.frontend, Finished(request.request_id, stages, request.rank))
        self._close(request)

    def _cancel_all(self, request: Request, cause: CancelCause) -> None:
        if request.rank != NO_RANK:
            self._send(
                self._roster.names[request.rank],
                Cancel(request.request_id, ALL_CHOICES, cause),
            )
        self._close(request)

    def _fail(
        self, request: Request, status: int, code: str, message: str, param: str | None = None
    ) -> None:
        retry_after = self._settings.retry_after_seconds if status in (429, 503) else None
        self._send(
            request.frontend,
            RequestFailed(request.request_id, status, code, message, param, retry_after),
        )
        self._cancel_all(request, "failed")

    def _close(self, request: Request) -> None:
        """Forget a request; what it occupied is free again."""
        if request.tokenizer is not None and request.tokenizer in self._roster.tokenizers:
            self._roster.tokenizers[request.tokenizer] -= 1
        for index in range(len(request.choices)):
            self._choice_done(request, index)
        self._admission.count(request, prompts=-1, waiting=-request.is_waiting)
        request.stage = "finished"
        del self._requests[request.request_id]

    # ---- plumbing ------------------------------------------------------------------------------------------

    def _in_stage(self, stage: Stage) -> list[Request]:
        return [request for request in self._requests.values() if request.stage == stage]

    def _send(self, peer: ProcessName, message: Message, *frames: Payload) -> None:
        self._out.append(Outgoing(peer, message, frames))

    def _take(self) -> list[Outgoing]:
        out, self._out = self._out, []
        return out

    def check_integrity(self) -> None:
        """Compare the load counters with the requests.

        Raises:
            AssertionError: they disagree.
        """
        for rank, load in self._roster.loads.items():
            wanted = sum(r.open_choices for r in self._requests.values() if r.rank == rank)
            if load != wanted:
                raise AssertionError(f"rank {rank} counts {load} choices, has {wanted}")
        for name, load in self._roster.tokenizers.items():
            wanted = sum(r.tokenizer == name for r in self._requests.values())
            if load != wanted:
                raise AssertionError(f"{name} counts {load} prompts, has {wanted}")
        waiting = {r.call for r in self._requests.values() if r.is_waiting}
        if self.num_waiting != len(waiting):
            raise AssertionError(f"{self.num_waiting} requests wait, should be {len(waiting)}")
