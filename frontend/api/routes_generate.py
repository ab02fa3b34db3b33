"""The endpoints that generate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from frontend.api.answers import CollectedAnswer, StreamedAnswer
from frontend.api.dialect import AnswerHead, AnswerWriter, Dialect
from frontend.errors import ApiError
from frontend.generation.job import Job
from frontend.generation.request import ModelLimits
from frontend.http.access_log import span
from frontend.http.body_limits import read_body
from frontend.http.call import Call, call_of
from frontend.http.disconnect import DisconnectWatch, unless_gone
from frontend.http.reply import send_bytes
from frontend.http.stream_buffer import StreamBuffer
from frontend.links.body_reader import BodyForm
from frontend.services import OpenStream, Services
from transport.messages.generate import StageTimes

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


T = TypeVar("T")
DIRECT_BYTES = 65_536
"""Bodies up to this size are read at once, which takes a few milliseconds whatever they hold. The event
loop and the heartbeat would stand still for larger ones."""


async def receive_body(
    scope: Scope, receive: Receive, services: Services, form: BodyForm[T]
) -> tuple[T, ModelLimits]:
    """What the body asks for. Nothing is read of it unless requests are let in.

    Raises:
        ApiError: 503 (not ready), or what is wrong with the body.
        ClientGone: the client left.
    """
    call = call_of(scope)
    services.gate.admit()
    with services.bodies.share() as share:
        body = await read_body(call.headers, receive, services.body_limits, share)
        call.is_body_read = True
        limits = services.gate.admit()
        if len(body) <= DIRECT_BYTES:
            return form.read(bytes(body), limits), limits
        return await unless_gone(receive, services.body_reader.read(form, body, limits)), limits


class GenerateEndpoint:
    """One generating API."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, dialect = self._services, self._dialect
        request, limits = await receive_body(scope, receive, services, dialect.form)
        call = call_of(scope)
        created = int(time.time())  # noqa: TID251  as the API has it
        head = AnswerHead(dialect.id_prefix + call.id, created, limits.model_name)
        job = services.new_job(call, request)
        stages = StageTimes()
        try:
            make = partial(dialect.writer, head, request, services.texts, job.usage)
            # To decode the ids of long prompts would hold up the event loop.
            writer = await asyncio.to_thread(make) if request.echoes_ids else make()
            if request.stream:
                await self._stream(call, receive, send, job, writer)
            else:
                await _answer(receive, send, job, writer)
            stages = await job.wait_closed()
        except ApiError:
            job.give_up()
            raise
        finally:
            services.close_job(job)
            call.work = _describe(job, stages)

    async def _stream(
        self, call: Call, receive: Receive, send: Send, job: Job, writer: AnswerWriter
    ) -> None:
        buffer = StreamBuffer(
            self._services.settings.stream_high_water_bytes,
            job.throttle,
            asyncio.get_running_loop().time(),
        )
        answer = StreamedAnswer(job.choice_count, writer, buffer)
        job.start(answer)

        def leave() -> None:
            job.cancel("client")
            buffer.end()

        stream = OpenStream(job, buffer, call.abort)
        self._services.streams.add(stream)
        try:
            async with DisconnectWatch(receive, leave):
                await _send_events(send, answer, buffer)
        finally:
            self._services.streams.discard(stream)


async def _answer(receive: Receive, send: Send, job: Job, writer: AnswerWriter) -> None:
    answer = CollectedAnswer(job.choice_count)
    job.start(answer)

    def leave() -> None:
        job.cancel("client")
        answer.leave()

    async with DisconnectWatch(receive, leave):
        choices = await answer.result()
    if choices is not None:
        await send_bytes(send, 200, writer.answer(choices))


async def _send_events(send: Send, answer: StreamedAnswer, buffer: StreamBuffer) -> None:
    """The headers go out with the first event, so that an early error is a plain answer."""
    data = await buffer.take()
    if answer.early_error is not None:
        raise answer.early_error
    answer.begin()
    await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
    while True:
        is_last = buffer.is_drained
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        if is_last:
            return
        buffer.sent()
        data = await buffer.take()


def _describe(job: Job, stages: StageTimes) -> list[str]:
    """What the access log says of a job that has ended."""
    usage, reasons = job.usage(), Counter(job.finish_reasons)
    if reasons.total() > 1:  # how often each: a request may have more than a hundred choices
        finish = ",".join(f"{reason}:{count}" for reason, count in sorted(reasons.items()))
    else:
        finish = "".join(reasons) or job.cancelled or "error"
    spans = (
        ("tokenize", stages.tokenizing, stages.queued),
        ("queue", stages.queued, stages.running),
        ("first_token", job.received_at, job.first_token_at),
    )
    return [
        f"prompt={usage.prompt} completion={usage.completion} cached={usage.cached}",
        f"finish={finish}",
        *(span(name, start, end) for name, start, end in spans if start and end),
    ]
