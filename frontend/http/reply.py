"""Send answers through ASGI."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Send

from frontend.errors import ApiError
from frontend.http.call import Call

JSON_TYPE = b"application/json"
LINGER_SECONDS = 2.0
"""How long a refused client may go on sending before the connection is closed: to close while bytes are
unread would reset it, and the client would never see the answer."""
LINGER_BYTES = 64 << 20
"""How much is read of it meanwhile: twice what a body may have by default. The rest waits in the kernel: to
read and drop it would keep the event loop busy for as long as a client likes."""
SMALL_BODY_BYTES = 1 << 20
"""An unread body up to this size is skipped; for a larger one the connection is closed."""

Headers = list[tuple[bytes, bytes]]


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON_TYPE,
    headers: Headers | None = None,
) -> None:
    await _send_head(send, status, body, content_type, headers or [])
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, receive: Receive, call: Call, error: ApiError) -> None:
    """If a large part of the body has not been read, the connection is closed afterwards, once the
    client has had time to see the answer."""
    headers = error.all_headers()
    if not _has_much_unread(call):
        await send_bytes(send, error.status, error.body(), headers=headers)
        return
    if (b"connection", b"close") not in headers:
        headers.append((b"connection", b"close"))
    body = error.body()
    await _send_head(send, error.status, body, JSON_TYPE, headers)
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            await _drop_body(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    left = LINGER_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))
    await asyncio.sleep(LINGER_SECONDS)


async def _send_head(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Headers
) -> None:
    length = str(len(body)).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", content_type), (b"content-length", length), *headers],
        }
    )


def _has_much_unread(call: Call) -> bool:
    if call.is_body_read:
        return False
    headers = call.headers
    if b"transfer-encoding" in headers or headers.get(b"expect", b"").lower() == b"100-continue":
        return True
    length = headers.get(b"content-length", b"0")
    return length.isdigit() and int(length) > SMALL_BODY_BYTES
