"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from frontend.api.routes_generate import receive_body
from frontend.api.tokenize import read_detokenize, read_tokenize
from frontend.http.call import call_of
from frontend.http.reply import send_bytes
from frontend.services import Services
from transport.ids import RequestId


class Tokenize:
    """`POST /tokenize`: a text or a conversation as token ids."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, limits = await receive_body(scope, receive, self._services)
        prompt = read_tokenize(body, limits)
        ids = await self._services.router.encode(RequestId(call_of(scope).id), prompt)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": limits.max_model_len}
        await send_bytes(send, 200, msgspec.json.encode(answer))


class Detokenize:
    """`POST /detokenize`: token ids as text."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, limits = await receive_body(scope, receive, self._services)
        text = self._services.texts.decode(read_detokenize(body, limits))
        await send_bytes(send, 200, msgspec.json.encode({"prompt": text, "content": text}))
