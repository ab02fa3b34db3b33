"""The requests of the hostile clients, built once and kept in files: the kernel sends them from there, so
that making them costs the machine nothing while it is measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Final

COMPLETIONS: Final = "/v1/completions"
LARGE: Final = 15_000_000
TRAILERS: Final = b"".join(b"X-%d: " % i + b"a" * 1000 + b"\r\n" for i in range(1000))

MANY_CHOICES: Final = {
    "prompt": [f"tell me {i}" for i in range(256)], "n": 16, "max_tokens": 1500, "ignore_eos": True,
    "stream": True,
}  # fmt: skip
UNREAD: Final = {
    "prompt": "hello", "n": 16, "logprobs": 5, "max_tokens": 1500, "ignore_eos": True, "stream": True,
}  # fmt: skip
OVERTAKING: Final = {"prompt": "hello", "max_tokens": 16, "priority": -(2**63)}
SHORT_STREAM: Final = {"prompt": "hello", "max_tokens": 16, "ignore_eos": True, "stream": True}


def request(path: str, body: bytes, *headers: str, close: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *headers, *(["Connection: close"] if close else [])]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def json_request(path: str, body: object, *, close: bool = True) -> bytes:
    return request(path, json.dumps(body).encode(), close=close)


def write_large(folder: Path) -> None:
    """Whole requests, by name, of 31 MB and less."""
    lists = b"[" + b"[]," * 10_600_000 + b"[]]"
    keys = b",".join(b'"%d":[]' % i for i in range(2_400_000))
    ids = b"1," * LARGE + b"1"
    for name, whole in {
        "prompt": request(COMPLETIONS, b'{"prompt":"' + b"a " * LARGE + b'"}'),
        "keys": request(COMPLETIONS, b'{"prompt":"a","metadata":{' + keys + b"}}"),
        "gzip": request(COMPLETIONS, gzip.compress(lists), "Content-Encoding: gzip"),
        "ids": request(COMPLETIONS, b'{"prompt":[' + ids + b"]}"),
        "detokenize": request("/detokenize", b'{"tokens":[' + ids + b"]}"),
        # Announces a byte more than there is.
        "unfinished": request(COMPLETIONS, b" " * (2 * LARGE) + b"!")[:-1],
    }.items():
        (folder / name).write_bytes(whole)
