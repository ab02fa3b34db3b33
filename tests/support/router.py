"""The router's rules with one frontend, one tokenizer and workers: what tests say and read."""

from __future__ import annotations

import zmq

from daemon.router.core import RouterCore
from daemon.router.metrics import RouterMetrics
from daemon.router.outbox import Outgoing
from daemon.router.settings import RouterSettings
from transport.child import ProcessSettings
from transport.framing import encode_header, read_tokens, token_frame
from transport.ids import ProcessName, RequestId
from transport.messages.generate import (
    Encoded,
    Generate,
    ModelInfo,
    SamplingParams,
    TokenBatch,
)
from transport.messages.to_router import Submit, WorkerReady
from transport.messages.to_worker import Start
from transport.sockets import Received
from transport.telemetry.metrics import MetricSet

FRONTEND = ProcessName("frontend/0")
TOKENIZER = ProcessName("tokenizer/0")
LONG = bytes(12 << 20)
"""Three such prompts are more than a tokenizer is given at a time."""
TOO_LONG = bytes(3 * len(LONG))
MODEL = ModelInfo(vocab_size=100, max_model_len=64, eos_token_ids=(2,), pool_tokens=64)


def worker(rank: int) -> ProcessName:
    return ProcessName(f"worker/{rank}")


def make_core(metrics: MetricSet | None = None, **changes) -> RouterCore:
    process = ProcessSettings(ProcessName("router/0"), "router", "test", "/tmp", 1, "hash")
    values = dict(
        process=process, workers=1, tokenizers=1, max_waiting=4, max_waiting_choices=12,
        max_waiting_bytes=100 << 20, routing="least-loaded",
        retry_after_seconds=3, max_migrations=2, stage_seconds=10.0, start_seconds=100.0,
    )  # fmt: skip
    chosen = RouterSettings(**{**values, **changes})
    return RouterCore(chosen, RouterMetrics(metrics or MetricSet(), chosen))


def serving_core(ranks: int = 1, **changes) -> RouterCore:
    core = make_core(workers=ranks, **changes)
    core.peer_joined(FRONTEND, "frontend", 0.0)
    core.peer_joined(TOKENIZER, "tokenizer", 0.0)
    for rank in range(ranks):
        core.worker_ready(worker(rank), WorkerReady(rank, MODEL, 8))
    return core


def generating(max_tokens: int) -> Generate:
    return Generate(SamplingParams(max_tokens=max_tokens))


def submit(
    core: RouterCore, name: str, n: int = 1, max_tokens: int = 8, call: str = "", text=b"text",
    call_choices: int = 0, now: float = 1.0,
):  # fmt: skip
    message = Submit(
        RequestId(name), "text", generating(max_tokens), 0.0, n=n, call=call,
        call_choices=call_choices,
    )  # fmt: skip
    return core.submit(FRONTEND, message, text, now)


def encoded(core: RouterCore, name: str, ids=(5, 6, 7), now: float = 2.0):
    return core.encoded(TOKENIZER, Encoded(RequestId(name)), token_frame(list(ids)), now)


def batch(core: RouterCore, rank: int, rows, started=(), now: float = 3.0):
    """rows: (request, index, tokens, finish)"""
    header = TokenBatch(
        frontend=FRONTEND,
        step=1,
        request_ids=[RequestId(row[0]) for row in rows],
        indexes=[row[1] for row in rows],
        counts=[len(row[2]) for row in rows],
        finish=[row[3] for row in rows],
        started=[(RequestId(name), 0, 0, 3) for name in started],
    )
    ids = [token for row in rows for token in row[2]]
    frames = [zmq.Frame(bytes(token_frame(ids)))]
    received = Received(header, zmq.Frame(encode_header(header)), frames, worker(rank))
    return core.tokens(worker(rank), header, received, now)


def messages(outgoing: list[Outgoing], kind: type) -> list:
    return [item.message for item in outgoing if isinstance(item.message, kind)]


def starts(outgoing: list[Outgoing]) -> list[tuple[ProcessName, Start, list[int]]]:
    return [
        (item.peer, item.message, read_tokens(item.frames[0]).tolist())
        for item in outgoing
        if isinstance(item.message, Start)
    ]
