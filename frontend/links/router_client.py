"""The frontend's line to the router: submits prompts, gives tokens to the requests they are for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

import zmq

from frontend.errors import ApiError
from frontend.generation.generation import Generation
from frontend.generation.request import Prompt
from frontend.metrics import FrontendMetrics
from transport.framing import Payload, TokenArray, read_tokens
from transport.ids import RequestId
from transport.logprobs import LogprobReader
from transport.messages.base import Message
from transport.messages.generate import (
    Cancel,
    CancelCause,
    Encode,
    Encoded,
    RequestFailed,
    Throttle,
    TokenBatch,
)
from transport.messages.to_frontend import Finished
from transport.messages.to_router import Submit
from transport.sockets import FrameTooLargeError

ENCODE_SECONDS = 60.0
LOST = "The server's router was lost: try again soon."
RETRY_AFTER_SECONDS = 1

AboutRequests = TokenBatch | Finished | RequestFailed | Encoded
Send = Callable[..., bool]
"""`send(message, *frames)`; False if the router does not read."""


class RouterClient:
    """All live requests of this frontend. Used on the loop's thread alone."""

    def __init__(self, send: Send, metrics: FrontendMetrics) -> None:
        self._send = send
        self._metrics = metrics
        self._live: dict[RequestId, Generation] = {}
        self._encodes: dict[RequestId, asyncio.Future[TokenArray]] = {}

    @property
    def live(self) -> int:
        return len(self._live)

    # ---- out ----

    def submit(self, generation: Generation, message: Submit) -> None:
        """Hand a prompt in.

        Raises:
            ApiError: 413 or 503, the router does not take it.
        """
        self._send_or_fail(message, generation.prompt.frame)
        self._live[generation.request_id] = generation

    def cancel(self, request_id: RequestId, index: int, cause: CancelCause) -> None:
        if request_id in self._live:
            self._send(Cancel(request_id, index, cause))

    def throttle(self, request_id: RequestId, index: int, paused: bool) -> None:
        if request_id in self._live:
            self._send(Throttle(request_id, index, paused))

    def forget(self, request_id: RequestId) -> None:
        """Nothing more is wanted of this request; what still comes is dropped."""
        self._live.pop(request_id, None)

    async def encode(self, request_id: RequestId, prompt: Prompt) -> TokenArray:
        """The token ids of a prompt.

        Raises:
            ApiError: the prompt cannot be encoded, or nobody answers in time.
        """
        future: asyncio.Future[TokenArray] = asyncio.get_running_loop().create_future()
        self._encodes[request_id] = future
        try:
            self._send_or_fail(
                Encode(request_id, prompt.kind, prompt.add_special_tokens, prompt.affinity),
                prompt.frame,
            )
            return await asyncio.wait_for(future, ENCODE_SECONDS)
        except TimeoutError as error:
            raise ApiError(504, f"The tokenizer took more than {ENCODE_SECONDS:g} s.") from error
        finally:
            if not future.done() or future.cancelled():
                self._send(Cancel(request_id))
            del self._encodes[request_id]

    def router_lost(self) -> None:
        """The router is gone, and with it all that it worked on."""
        error = ApiError(503, LOST, code="router_lost", retry_after=RETRY_AFTER_SECONDS)
        for generation in list(self._live.values()):
            generation.fail(error)
        self._live.clear()
        for future in self._encodes.values():
            if not future.done():
                future.set_exception(error)

    def _send_or_fail(self, message: Message, frame: Payload) -> None:
        try:
            sent = self._send(message, frame)
        except FrameTooLargeError as error:
            raise ApiError(
                413,
                f"As one message the prompt has more than {error.limit} bytes: send a shorter one.",
            ) from error
        if not sent:
            raise ApiError(
                503, "The server's router does not answer: try again soon.", retry_after=1
            )

    # ---- in ----

    def handle(self, message: AboutRequests, frames: list[zmq.Frame]) -> None:
        match message:
            case TokenBatch() as batch:
                self._on_tokens(batch, frames)
            case Finished(request_id, stages):
                generation = self._live.pop(request_id, None)
                if generation is not None:
                    generation.on_closed(stages)
            case RequestFailed() as failure:
                self._on_failed(failure)
            case Encoded(request_id):
                future = self._encodes.get(request_id)
                if future is not None and not future.done():
                    future.set_result(read_tokens(frames[0]))
            case other:
                assert_never(other)

    def _on_tokens(self, batch: TokenBatch, frames: list[zmq.Frame]) -> None:
        now = time.monotonic()
        live = self._live
        for request_id, _, cached, prompt in batch.started:
            generation = live.get(request_id)
            if generation is not None and not generation.started:
                generation.on_started(cached, prompt)
                self._metrics.saw_prompt(prompt)
        if not batch.request_ids:
            return
        ids = read_tokens(frames[0]).tolist()
        if len(frames) > 1:
            self._on_rows_with_logprobs(batch, ids, frames[1], now)
            return
        at = 0
        for request_id, index, count, finish in zip(
            batch.request_ids, batch.indexes, batch.counts, batch.finish, strict=True
        ):
            generation = live.get(request_id)
            if generation is not None:
                generation.on_row(index, ids[at : at + count], finish, None, now)
            at += count

    def _on_rows_with_logprobs(
        self, batch: TokenBatch, ids: list[int], frame: zmq.Frame, now: float
    ) -> None:
        reader = LogprobReader(frame)
        at = 0
        for row, request_id in enumerate(batch.request_ids):
            row_ids = ids[at : at + batch.counts[row]]
            at += batch.counts[row]
            top = batch.logprobs[row]
            # Read also what nobody wants: the next row lies behind it.
            logprobs = reader.read(row_ids, top) if top >= 0 else None
            generation = self._live.get(request_id)
            if generation is not None:
                generation.on_row(batch.indexes[row], row_ids, batch.finish[row], logprobs, now)

    def _on_failed(self, failure: RequestFailed) -> None:
        error = ApiError(
            failure.status,
            failure.message,
            param=failure.param,
            code=failure.code,
            retry_after=failure.retry_after,
        )
        future = self._encodes.get(failure.request_id)
        if future is not None and not future.done():
            future.set_exception(error)
        generation = self._live.pop(failure.request_id, None)
        if generation is not None:
            generation.fail(error)
