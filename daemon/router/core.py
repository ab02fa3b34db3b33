"""The router's rules: messages and losses in, messages out. No sockets and no clock in here.

A request is `received`, then `tokenizing` at one tokenizer, `queued` at one worker, `running` from
its first chunk on, and `finished`. The router keeps the prompt and the tokens that the client has
until the end, so that a request can go on elsewhere when its tokenizer or worker is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from daemon.router.metrics import RouterMetrics
from daemon.router.placement import choose_rank, choose_tokenizer
from daemon.router.request import NO_RANK, Choice, Request
from daemon.router.settings import RouterSettings
from transport.framing import Payload, read_tokens
from transport.ids import ProcessName, RequestId
from transport.messages import (
    ALL_CHOICES,
    RUNNING,
    Cancel,
    CancelCause,
    Encode,
    Encoded,
    Finished,
    Message,
    ModelInfo,
    RequestFailed,
    RequestRow,
    SequenceFailed,
    Serving,
    Start,
    Submit,
    Throttle,
    TokenBatch,
    WorkerReady,
)
from transport.sockets import Received

MAX_ROWS: Final = 1000

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outgoing:
    """A message to be sent. With `forward`, the received message goes on as it came."""

    peer: ProcessName
    message: Message | None
    frames: tuple[Payload, ...] = ()
    forward: Received | None = None


class RouterCore:
    """State of all requests. Every method returns what has to be sent, in order."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._requests: dict[RequestId, Request] = {}
        self._frontends: set[ProcessName] = set()
        self._tokenizers: dict[ProcessName, int] = {}  # -> requests there
        self._ranks: dict[int, int] = {}  # ready ranks -> open choices there
        self._worker_names: dict[int, ProcessName] = {}
        self._models: dict[int, ModelInfo] = {}
        self._out: list[Outgoing] = []
        self._draining = False

    # ---- peers -----------------------------------------------------------------------------------

    def peer_joined(self, peer: ProcessName, role: str, now: float) -> list[Outgoing]:
        """A frontend or tokenizer has said hello (a worker joins with `WorkerReady`)."""
        if role == "frontend":
            self._frontends.add(peer)
            if self._models:
                self._send(peer, Serving(self._model()))
        elif role == "tokenizer":
            self._tokenizers[peer] = 0
            for request in self._in_stage("received"):
                self._to_tokenizer(request, now)
        return self._take()

    def worker_ready(self, peer: ProcessName, ready: WorkerReady, now: float) -> list[Outgoing]:
        """A worker takes sequences from now on."""
        self._ranks[ready.rank] = 0
        self._worker_names[ready.rank] = peer
        self._models[ready.rank] = ready.model
        for frontend in self._frontends:
            self._send(frontend, Serving(self._model()))
        for request in self._in_stage("queued"):
            if request.rank == NO_RANK:
                self._to_worker(request, now)
        return self._take()

    def peer_lost(self, peer: ProcessName, now: float) -> list[Outgoing]:
        """A process is gone: its requests are resubmitted elsewhere, a frontend's are dropped."""
        if peer in self._frontends:
            self._frontends.discard(peer)
            for request in [r for r in self._requests.values() if r.frontend == peer]:
                self._cancel_all(request, "client")
        elif peer in self._tokenizers:
            del self._tokenizers[peer]
            for request in [r for r in self._in_stage("tokenizing") if r.tokenizer == peer]:
                request.tokenizer = None
                self._to_tokenizer(request, now)
        else:
            for rank in [r for r, name in self._worker_names.items() if name == peer]:
                self._worker_lost(rank, now)
        return self._take()

    def _worker_lost(self, rank: int, now: float) -> None:
        del self._worker_names[rank]
        self._ranks.pop(rank, None)
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
            request.enter("queued", now)
            self._to_worker(request, now)

    def _model(self) -> ModelInfo:
        models = list(self._models.values())
        pool = min(model.pool_tokens for model in models)
        return msgspec.structs.replace(models[0], pool_tokens=pool)

    # ---- from frontends ---------------------------------------------------------------------------

    def submit(
        self, peer: ProcessName, message: Submit, frame: Payload, now: float
    ) -> list[Outgoing]:
        """A new request to run."""
        request = Request(
            request_id=message.request_id,
            frontend=peer,
            kind=message.kind,
            sampling=message.sampling,
            choices=[Choice() for _ in range(message.n)],
            priority=message.priority,
            affinity=message.affinity,
            add_special_tokens=message.add_special_tokens,
            prompt_frame=frame,
            received_at=message.received_at,
            prefix_cache=message.prefix_cache,
            cache_salt=message.cache_salt,
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
            sampling=None,
            choices=[],
            priority=0,
            affinity=message.affinity,
            add_special_tokens=message.add_special_tokens,
            prompt_frame=frame,
            received_at=now,
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
        self._metrics.waiting.set(self.num_waiting)
        if request.kind == "tokens":
            self._encoded(request, request.prompt_frame, now)
        else:
            self._to_tokenizer(request, now)
        return self._take()

    def _refusal(self, request: Request) -> RequestFailed | None:
        request_id, seconds = request.request_id, self._settings.retry_after_seconds
        if self._draining:
            message = "The server is shutting down and takes no new requests."
            return RequestFailed(request_id, 503, "shutting_down", message, retry_after=seconds)
        if not self._models:
            message = "The model is still being loaded: try again soon."
            return RequestFailed(request_id, 503, "not_ready", message, retry_after=seconds)
        if self.num_waiting >= self._settings.max_waiting:
            message = (
                f"The server is overloaded: {self.num_waiting} requests are waiting already. "
                f"Try again in {seconds} s."
            )
            return RequestFailed(request_id, 429, "overloaded", message, retry_after=seconds)
        if request_id in self._requests:
            message = "The request id is in use."
            return RequestFailed(request_id, 409, "duplicate_request_id", message)
        return None

    def cancel(self, message: Cancel, now: float) -> list[Outgoing]:
        """The client has gone, a stop string was found, or the reader is too slow."""
        request = self._requests.get(message.request_id)
        if request is None:
            return []
        if message.index == ALL_CHOICES:
            self._cancel_all(request, message.cause)
        elif message.index < len(request.choices):
            if request.rank != NO_RANK:
                self._send(self._worker_names[request.rank], message)
            self._choice_done(request, message.index)
            self._close_if_done(request, now)
        return self._take()

    def throttle(self, message: Throttle) -> list[Outgoing]:
        """Pass on that a choice shall pause or go on."""
        request = self._requests.get(message.request_id)
        if request is not None and request.rank != NO_RANK:
            self._send(self._worker_names[request.rank], message)
        return self._take()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    # ---- from tokenizers -----------------------------------------------------------------------------

    def encoded(
        self, peer: ProcessName, message: Encoded, frame: Payload, now: float
    ) -> list[Outgoing]:
        """A prompt's token ids."""
        request = self._left_tokenizer(peer, message.request_id)
        if request is not None:
            self._metrics.render_seconds.observe(message.render_seconds)
            self._metrics.encode_seconds.observe(message.encode_seconds)
            self._encoded(request, frame, now)
        return self._take()

    def encoding_failed(self, peer: ProcessName, message: RequestFailed) -> list[Outgoing]:
        """A prompt that cannot be rendered or encoded."""
        request = self._left_tokenizer(peer, message.request_id)
        if request is not None:
            self._send(request.frontend, message)
            self._close(request)
        return self._take()

    def _left_tokenizer(self, peer: ProcessName, request_id: RequestId) -> Request | None:
        request = self._requests.get(request_id)
        if request is None or request.stage != "tokenizing" or request.tokenizer != peer:
            return None
        self._tokenizers[peer] -= 1
        request.tokenizer = None
        return request

    def _encoded(self, request: Request, frame: Payload, now: float) -> None:
        if request.sampling is None:
            self._send(request.frontend, Encoded(request.request_id), frame)
            self._close(request)
            return
        prompt = np.array(read_tokens(frame), dtype=np.int32)
        request.prompt_frame = b""
        model = self._model()
        room = min(model.max_model_len, model.pool_tokens) - len(prompt)
        param = "messages" if request.kind == "chat" else "prompt"
        if not len(prompt):
            self._fail(request, 400, "empty_prompt", "The prompt has no tokens.", param)
        elif room < 1:
            self._fail(
                request, 400, "context_length_exceeded",
                f"The prompt has {len(prompt)} tokens, but the model's maximum context length is "
                f"{len(prompt) + room} tokens, prompt and answer together: shorten the prompt.",
                param,
            )  # fmt: skip
        elif request.kind == "tokens" and not _in_vocabulary(prompt, model.vocab_size):
            self._fail(
                request, 400, "invalid_token",
                f"prompt has a token id outside of 0..{model.vocab_size - 1}.", param,
            )  # fmt: skip
        else:
            sampling = request.sampling
            limit = min(sampling.max_tokens, room)
            request.sampling = msgspec.structs.replace(
                sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit)
            )
            request.prompt = prompt
            request.enter("queued", now)
            self._to_worker(request, now)

    # ---- from workers -------------------------------------------------------------------------------

    def tokens(
        self, peer: ProcessName, batch: TokenBatch, received: Received, now: float
    ) -> list[Outgoing]:
        """One step's tokens for one frontend."""
        rank = next((r for r, name in self._worker_names.items() if name == peer), NO_RANK)
        if rank == NO_RANK:
            return []  # a worker that has been given up: its requests run elsewhere
        for request_id, _index, _cached, _prompt in batch.started:
            request = self._requests.get(request_id)
            if request is not None and request.stage == "queued" and request.rank == rank:
                request.enter("running", now)
                self._metrics.queue_seconds.observe(now - request.queued_at)
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

    def sequence_failed(self, message: SequenceFailed) -> list[Outgoing]:
        """A worker cannot go on with a request."""
        request = self._requests.get(message.request_id)
        if request is not None:
            self._fail(request, message.status, message.code, message.message)
        return self._take()

    # ---- time ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Outgoing]:
        """Fail what has been in the hands of no worker for too long; refresh the gauges."""
        deadline = now - self._settings.stage_seconds
        for request in list(self._requests.values()):
            unplaced = request.stage in ("received", "tokenizing") or request.rank == NO_RANK
            if unplaced and request.stage_since < deadline:
                where = "a worker" if request.stage == "queued" else "the tokenizer"
                self._fail(
                    request, 503, "timeout",
                    f"The request waited {self._settings.stage_seconds:g} s for {where}.",
                )  # fmt: skip
        self._metrics.update(self._requests.values())
        choices = {self._worker_names[rank]: load for rank, load in self._ranks.items()}
        self._metrics.update_outstanding(self._tokenizers, choices)
        return self._take()

    # ---- steps of a request -------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has begun."""
        return sum(request.is_waiting for request in self._requests.values())

    @property
    def num_requests(self) -> int:
        """All live requests."""
        return len(self._requests)

    def rows(self) -> list[RequestRow]:
        """The oldest live requests."""
        return [request.row() for request in list(self._requests.values())[:MAX_ROWS]]

    def _to_tokenizer(self, request: Request, now: float) -> None:
        if not self._tokenizers:
            request.enter("received", now)
            return
        name = choose_tokenizer(request.affinity, self._tokenizers)
        self._tokenizers[name] += 1
        self._metrics.prompts_at(name, self._tokenizers[name])
        request.tokenizer = name
        request.enter("tokenizing", now)
        job = Encode(request.request_id, request.kind, request.add_special_tokens, request.affinity)
        self._send(name, job, request.prompt_frame)

    def _to_worker(self, request: Request, now: float) -> None:
        if not self._ranks:
            return  # placed when a worker gets ready, or failed by `tick`
        assert request.sampling is not None and request.prompt is not None
        rank, overloaded = choose_rank(self._settings.routing, request.affinity, self._ranks)
        if overloaded:
            self._metrics.affinity_passed_over.add()
        request.rank = rank
        self._ranks[rank] += request.open_choices
        self._metrics.choices_at(self._worker_names[rank], self._ranks[rank])
        for index, choice in enumerate(request.choices):
            if choice.done:
                continue
            start = Start(
                request_id=request.request_id,
                index=index,
                frontend=request.frontend,
                prompt_len=len(request.prompt),
                sampling=request.sampling,
                priority=request.priority,
                arrival=request.received_at,
                prefix_cache=request.prefix_cache,
                cache_salt=request.cache_salt,
            )
            self._send(self._worker_names[rank], start, request.tokens_so_far(index))

    def _choice_done(self, request: Request, index: int) -> None:
        choice = request.choices[index]
        if not choice.done:
            choice.done = True
            if request.rank in self._ranks:
                self._ranks[request.rank] -= 1

    def _close_if_done(self, request: Request, now: float) -> None:
        if request.open_choices or request.request_id not in self._requests:
            return
        stages = request.stage_times(finished=now)
        self._send(request.frontend, Finished(request.request_id, stages, request.rank))
        self._close(request)

    def _cancel_all(self, request: Request, cause: CancelCause) -> None:
        if request.rank != NO_RANK:
            self._send(
                self._worker_names[request.rank],
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
        self._cancel_all(request, "client")

    def _close(self, request: Request) -> None:
        """Forget a request; what it occupied is free again."""
        if request.tokenizer is not None and request.tokenizer in self._tokenizers:
            self._tokenizers[request.tokenizer] -= 1
        for index in range(len(request.choices)):
            self._choice_done(request, index)
        request.stage = "finished"
        del self._requests[request.request_id]

    # ---- plumbing ------------------------------------------------------------------------------------------

    def _in_stage(self, stage: str) -> list[Request]:
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
        for rank, load in self._ranks.items():
            wanted = sum(r.open_choices for r in self._requests.values() if r.rank == rank)
            if load != wanted:
                raise AssertionError(f"rank {rank} counts {load} choices, has {wanted}")
        for name, load in self._tokenizers.items():
            wanted = sum(r.tokenizer == name for r in self._requests.values())
            if load != wanted:
                raise AssertionError(f"{name} counts {load} prompts, has {wanted}")


def _in_vocabulary(ids: Iterable[int], vocab_size: int) -> bool:
    array = np.asarray(ids)
    return bool(array.min() >= 0 and array.max() < vocab_size)
