"""HTTP by hand, for clients that misbehave or come by the hundred."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    """Joined, where it came in chunks."""


def post_request(path: str, body: dict[str, object], *, close: bool = True) -> bytes:
    """`close`: the server ends the connection after its answer, which so can be read to the end."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n" if close else ""
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_answer(raw: bytes) -> RawAnswer:
    """All that came on a connection for one answer."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        body = _join_chunks(body)
    return RawAnswer(int(lines[0].split()[1]), headers, body)


def _join_chunks(data: bytes) -> bytes:
    parts = []
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(data[:length])
        data = data[length + 2 :]
