"""Logprobs come out of a frame as they went in, row by row, whatever each row wants."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from transport.logprobs import LOWEST, LogprobReader, LogprobWriter, TokenLogprob


@dataclass
class Found:
    chosen: float
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def found(chosen: float, *top: tuple[int, float]) -> Found:
    ids, values = zip(*top, strict=True)
    return Found(chosen, np.array(ids, np.int32), np.array(values, np.float32))


def test_rows_of_different_widths_are_read_as_they_were_written():
    writer = LogprobWriter()
    writer.write(found(-0.5, (7, -0.5), (9, -2.0), (4, -3.0)), 2)
    writer.write(found(-4.0, (1, -0.25)), 0)
    writer.write(found(-1.5, (3, -0.125), (5, -1.5)), 1)
    writer.write(found(-2.5, (8, -0.75), (6, -2.5)), 1)
    reader = LogprobReader(zmq.Frame(bytes(writer.frame())))
    assert reader.read([7], 2) == [TokenLogprob(7, -0.5, [(7, -0.5), (9, -2.0)])]
    assert reader.read([2], 0) == [TokenLogprob(2, -4.0, [])]
    assert reader.read([5, 6], 1) == [
        TokenLogprob(5, -1.5, [(3, -0.125)]), TokenLogprob(6, -2.5, [(8, -0.75)]),
    ]  # fmt: skip


def test_what_json_cannot_say_is_a_number():
    writer = LogprobWriter()
    writer.write(found(-np.inf, (1, 0.0), (2, -np.inf)), 2)
    (entry,) = LogprobReader(zmq.Frame(bytes(writer.frame()))).read([2], 2)
    assert msgspec.json.decode(msgspec.json.encode(entry)) == {
        "token_id": 2, "logprob": LOWEST, "top": [[1, 0.0], [2, LOWEST]],
    }  # fmt: skip
