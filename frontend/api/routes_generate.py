"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from frontend.api.openai_chat import read_chat
from frontend.api.openai_completions import read_completion
from frontend.api.replies import StreamedReply, WholeReply
from frontend.api.reply_format import ChatFormat, CompletionFormat, ReplyFormat, ReplyHead
from frontend.errors import ApiError
from frontend.generation.job import Job
from frontend.generation.request import GenerationRequest, ModelLimits
from frontend.http.body_limits import read_body
from frontend.http.call import call_of
from frontend.http.disconnect import DisconnectWatch
from frontend.http.protocol import ABORT
from frontend.http.reply import send_bytes
from frontend.http.stream_buffer import StreamBuffer
from frontend.services import OpenStream, Services

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def receive_body(
    scope: Scope, receive: Receive, services: Services
) -> tuple[bytes, ModelLimits]:
    """The body of a request, once it is clear that requests are taken.

    Raises:
        ApiError: 503 (not ready), or what is wrong with the body.
        ClientGone: the client left.
    """
    call = call_of(scope)
    services.gate.admit()
    body = await read_body(call.headers, receive, services.body_limits)
    call.is_body_read = True
    return body, services.gate.admit()


class _GenerateEndpoint(ABC):
    def __init__(
        self,
        services: Services,
        id_prefix: str,
        read: Callable[[bytes, ModelLimits], GenerationRequest],
    ) -> None:
        self._services = services
        self._id_prefix = id_prefix
        self._read = read

    @abstractmethod
    def _format(self, head: ReplyHead, request: GenerationRequest) -> ReplyFormat: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        body, limits = await receive_body(scope, receive, services)
        request = self._read(body, limits)
        call = call_of(scope)
        head = ReplyHead(self._id_prefix + call.id, int(time.time()), limits.model_name)
        reply_format = self._format(head, request)
        job = services.new_job(call, request)
        try:
            if request.common.stream:
                await self._stream(scope, receive, send, job, reply_format)
            else:
                await self._answer(receive, send, job, reply_format)
            call.stages = await job.wait_closed()
        except ApiError:
            job.give_up()
            raise
        finally:
            services.close_job(job)

    async def _answer(
        self, receive: Receive, send: Send, job: Job, reply_format: ReplyFormat
    ) -> None:
        reply = WholeReply(job, reply_format)
        job.start(reply)
        async with DisconnectWatch(receive, reply.leave):
            body = await reply.result()
        if body:
            await send_bytes(send, 200, body)

    async def _stream(
        self, scope: Scope, receive: Receive, send: Send, job: Job, reply_format: ReplyFormat
    ) -> None:
        buffer = StreamBuffer(
            self._services.settings.stream_high_water_bytes,
            job.throttle,
            asyncio.get_running_loop().time(),
        )
        reply = StreamedReply(job, reply_format, buffer)
        job.start(reply)
        abort = scope.get("extensions", {}).get(ABORT, reply.leave)
        stream = OpenStream(job, buffer, abort)
        self._services.streams.add(stream)
        try:
            async with DisconnectWatch(receive, reply.leave):
                await self._send_events(send, reply, buffer)
        finally:
            self._services.streams.discard(stream)

    async def _send_events(self, send: Send, reply: StreamedReply, buffer: StreamBuffer) -> None:
        """Headers go out with the first event, so that an early error is a plain answer."""
        data = await buffer.take()
        if reply.early_error is not None:
            raise reply.early_error
        reply.begin()
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        while True:
            is_last = buffer.is_drained
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_last:
                return
            buffer.sent()
            data = await buffer.take()


class ChatEndpoint(_GenerateEndpoint):
    """`POST /v1/chat/completions`."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, "chatcmpl-", read_chat)

    def _format(self, head: ReplyHead, request: GenerationRequest) -> ReplyFormat:
        common = request.common
        return ChatFormat(head, self._services.texts, common.include_usage, common.wants_logprobs)


class CompletionEndpoint(_GenerateEndpoint):
    """`POST /v1/completions`."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, "cmpl-", read_completion)

    def _format(self, head: ReplyHead, request: GenerationRequest) -> ReplyFormat:
        texts, common = self._services.texts, request.common
        echoes: list[str] = []
        if request.echo:
            for prompt in request.prompts:
                echo = prompt.echo or ""
                text = echo if isinstance(echo, str) else texts.decode(echo)
                echoes.extend([text] * common.n)
        return CompletionFormat(head, texts, common.include_usage, common.wants_logprobs, echoes)
