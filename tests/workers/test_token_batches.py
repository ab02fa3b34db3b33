"""What a step has yielded reaches each frontend in one message, row by row."""

from __future__ import annotations

import numpy as np
import zmq

from transport.framing import read_tokens
from transport.ids import ProcessName, RequestId
from transport.logprobs import LogprobReader, TokenLogprob
from transport.messages.generate import (
    FINISH_STOP,
    RUNNING,
    Generate,
    SamplingParams,
    TokenBatch,
)
from workers.contract import StepPlan, TokenLogprobs
from workers.scheduling.sequence import Sequence
from workers.scheduling.step import InFlightStep, StepOutput, TokenRow
from workers.token_batches import token_batches


def make_sequence(name: str, index: int, frontend: int, cached: int = 0, **sampling) -> Sequence:
    sequence = Sequence(
        key=(RequestId(name), index), frontend=ProcessName(f"frontend/{frontend}"),
        prompt=np.arange(9, dtype=np.int32), prompt_len=7,
        generate=Generate(SamplingParams(max_tokens=5, **sampling)), seed=0,
    )  # fmt: skip
    sequence.prefix.cached_tokens = cached
    return sequence


def batches(rows: list[TokenRow], started: list[Sequence]) -> dict[str, tuple[TokenBatch, list]]:
    step = InFlightStep(StepPlan(12), (), tuple(started))
    return {
        batch.frontend: (batch, frames) for batch, frames in token_batches(StepOutput(step, rows))
    }


def test_each_frontend_gets_its_rows_and_what_has_started():
    a0, a1 = (make_sequence("a", index, 0, cached=4) for index in range(2))
    b = make_sequence("b", 0, 1, cached=6)
    c = make_sequence("c", 0, 2)
    rows = [
        TokenRow(a0, 11, RUNNING, None),
        TokenRow(b, 12, FINISH_STOP, None),
        TokenRow(a1, 13, RUNNING, None),
    ]
    found = batches(rows, [a0, b, c])
    assert list(found) == ["frontend/0", "frontend/1", "frontend/2"]
    batch, (tokens,) = found["frontend/0"]
    assert (batch.request_ids, batch.indexes, batch.counts) == (["a", "a"], [0, 1], [1, 1])
    assert (batch.step, batch.finish, batch.started) == (12, [RUNNING] * 2, [("a", 0, 4, 7)])
    assert read_tokens(tokens).tolist() == [11, 13]
    batch, (tokens,) = found["frontend/1"]
    assert (batch.finish, batch.started) == ([FINISH_STOP], [("b", 0, 6, 7)])
    assert read_tokens(tokens).tolist() == [12]
    batch, (tokens,) = found["frontend/2"]
    assert (batch.request_ids, batch.started) == ([], [("c", 0, 0, 7)])
    assert not tokens


def test_logprobs_go_with_the_rows_that_want_them():
    def logprobs(*ids: int) -> TokenLogprobs:
        return TokenLogprobs(-0.5, np.array(ids, np.int32), -np.arange(len(ids), dtype=np.float32))

    a = make_sequence("a", 0, 0, logprobs=2)
    b = make_sequence("b", 0, 0)
    c = make_sequence("c", 0, 0, logprobs=0)
    rows = [
        TokenRow(a, 11, RUNNING, logprobs(4, 5, 6)),
        TokenRow(b, 12, RUNNING, None),
        TokenRow(c, 13, RUNNING, logprobs()),
    ]
    batch, (_, frame) = batches(rows, [])["frontend/0"]
    assert batch.logprobs == [2, -1, 0]
    reader = LogprobReader(zmq.Frame(bytes(frame)))
    assert reader.read([11], 2) == [TokenLogprob(11, -0.5, [(4, 0.0), (5, -1.0)])]
    assert reader.read([13], 0) == [TokenLogprob(13, -0.5, [])]
