"""Read a request's body within limits of type, size, encoding and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Mapping

import msgspec
from starlette.types import Receive

from frontend.errors import ApiError, ClientGone, bad_request
from frontend.http.body_budget import BodyShare

INFLATE_CHUNK = 1 << 17
"""Bytes inflated per turn of the event loop."""
INFLATED_BYTES = 16 << 20
"""Largest inflated body."""
FREE_INFLATED_BYTES = 1 << 20
"""An inflated body of this size may have come from however little."""
INFLATION_RATIO = 100
"""Largest size of a larger one, as a multiple of what was sent. Text has less than 20."""
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class BodyLimits(msgspec.Struct, frozen=True):
    """What a body may be."""

    max_bytes: int
    seconds: float


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, limits: BodyLimits, share: BodyShare
) -> bytearray:
    """The whole body, decompressed, as a share of the frontend's budget. It is never copied: that of a large
    one would hold up the event loop.

    If the head alone is a reason to refuse, nothing is read, so no `100 Continue` is sent.

    Raises:
        ApiError: 400, 408, 413, 415 or 503.
        ClientGone: the connection closed before the end of the body.
    """
    check_type(headers)
    encoding = _read_encoding(headers.get(b"content-encoding", b""))
    _check_announced(headers.get(b"content-length"), limits.max_bytes)
    try:
        async with share.arriving(limits.seconds):
            body = await _collect(receive, limits.max_bytes, share)
            if encoding is None:
                return body
            return await _inflate(body, encoding, limits.max_bytes, share)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"The body did not arrive within {limits.seconds:g} s.",
            headers=((b"connection", b"close"),),
        ) from error


def check_type(headers: Mapping[bytes, bytes]) -> None:
    """Only what says that it is JSON: a browser sends forms, plain text and bodies without a type for any
    page of the web, to any server, without asking it first.

    Raises:
        ApiError: 415.
    """
    value = headers.get(b"content-type", b"").decode("latin-1")
    media_type, *parameters = value.lower().split(";")
    if media_type.strip() == "application/json" and all(map(_is_harmless, parameters)):
        return
    found = f"not {value[:100]!r}" if value else "and there is none"
    raise ApiError(415, f"The Content-Type must be application/json, in UTF-8, {found}.")


def _is_harmless(parameter: str) -> bool:
    name, _, value = parameter.strip().partition("=")
    return name.strip() != "charset" or value.strip().strip('"') in ("utf-8", "utf8", "us-ascii")


def _read_encoding(value: bytes) -> str | None:
    encoding = value.decode("latin-1").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in _WINDOW_BITS:
        return encoding
    raise ApiError(415, "Content-Encoding must be gzip, deflate or identity, applied once.")


def _check_announced(value: bytes | None, max_bytes: int) -> None:
    if value is not None and value.isdigit() and int(value) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int, when: str = "") -> ApiError:
    return ApiError(
        413, f"The body is larger than {max_bytes} bytes{when}, the limit of this server."
    )


async def _collect(receive: Receive, max_bytes: int, share: BodyShare) -> bytearray:
    body = bytearray()  # not a list of parts: of a slow client, each may be a byte
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) + len(part) > max_bytes:
            raise _too_large(max_bytes)
        share.take(len(part))
        body += part
    return body


async def _inflate(
    data: bytes | bytearray, encoding: str, max_bytes: int, share: BodyShare
) -> bytearray:
    max_bytes = min(max_bytes, INFLATED_BYTES)
    max_ratio_bytes = max(FREE_INFLATED_BYTES, INFLATION_RATIO * len(data))
    body = bytearray()
    try:
        for part in _inflated_parts(data, encoding):
            if len(body) + len(part) > max_bytes:
                raise _too_large(max_bytes, " once inflated")
            if len(body) + len(part) > max_ratio_bytes:
                raise ApiError(
                    413, f"The body inflates to more than {INFLATION_RATIO} times its size."
                )
            share.take(len(part))
            body += part
            await asyncio.sleep(0)
    except zlib.error as error:
        raise bad_request(f"The body is no valid {encoding} data (Content-Encoding).") from error
    return body


def _inflated_parts(data: bytes | bytearray, encoding: str) -> Iterator[bytes]:
    """At most INFLATE_CHUNK bytes each. The inflater gets the data by pieces: at every call it copies
    what it has not consumed.

    Raises:
        ApiError: 400, the data is cut off or has a tail.
        zlib.error: it is no such data.
    """
    window = _WINDOW_BITS[encoding]
    if encoding == "deflate" and not _has_zlib_header(data):
        window = -15
    inflater = zlib.decompressobj(window)
    end = 0
    while end < len(data) and not inflater.eof:
        piece = bytes(data[end : end + INFLATE_CHUNK])
        end += len(piece)
        while not inflater.eof:
            part = inflater.decompress(piece, INFLATE_CHUNK)
            piece = inflater.unconsumed_tail
            if not part and not piece:
                break
            yield part
    if not inflater.eof or inflater.unused_data or end < len(data):
        raise bad_request(f"The {encoding} data (Content-Encoding) is cut off or has a tail.")


def _has_zlib_header(data: bytes | bytearray) -> bool:
    return len(data) >= 2 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
