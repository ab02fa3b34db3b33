"""Attention over pages against a plain reference, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from workers.attention import math as attention_math
from workers.attention.batch import Segment
from workers.attention.math import AttentionOptions, attend, attend_causally
from workers.attention.page_pool import PagePool
from workers.attention.torch_attention import DecodeStep, SegmentedStep
from workers.contract import ModelLoadError
from workers.models.hf.attention_function import paged_attention
from workers.models.hf.page_layout import LayerShape, build_cache_layout

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
CPU = torch.device("cpu")


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """One query row and head at a time, in float64. query [T,H,D], key and value from position 0;
    query row t is at position start + t."""
    out = torch.zeros(query.shape[0], HEADS, VALUE_DIM, dtype=torch.float64)
    for t in range(query.shape[0]):
        end = start + t + 1
        first = 0 if options.window is None else max(0, end - options.window)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = key[first:end, kv].double() @ query[t, head].double() * options.scaling
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: end - first]
            out[t, head] = weights @ value[first:end, kv].double()
    return out


def make_pool(num_pages: int) -> PagePool:
    layout = build_cache_layout(
        [LayerShape(KV_HEADS, DIM, VALUE_DIM)] * 2, "float32", LlamaConfig(), "w"
    )
    return PagePool(layout, num_pages, CPU)


def make_options(window: int | None, variant: str) -> AttentionOptions:
    return AttentionOptions(
        scaling=0.7,
        window=window,
        softcap=1.5 if variant == "softcap" else None,
        sinks=torch.tensor([1.0, -2.0, 3.0, 0.5]) if variant == "sinks" else None,
    )


LENGTHS = st.lists(
    st.one_of(st.integers(1, 20), st.sampled_from([127, 128, 129, 255, 256, 257])),
    min_size=1,
    max_size=3,
)
WINDOWS = st.sampled_from([None, 1, 5, 127, 128, 129, 130, 400])
VARIANTS = st.sampled_from(["plain", "softcap", "sinks"])


class Sequences:
    """Random keys and values of some sequences, their pages shuffled over a pool."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.keys = [self.normal(n, KV_HEADS, DIM) for n in lengths]
        self.values = [self.normal(n, KV_HEADS, VALUE_DIM) for n in lengths]
        counts = [-(-n // 128) for n in lengths]
        self.pool = make_pool(sum(counts) + 1)
        order = np.random.default_rng(seed).permutation(sum(counts)) + 1
        self.tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for row, pages in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            self.tables[row, : len(pages)] = torch.from_numpy(pages.astype(np.int32))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def place(self, sequence: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tables[sequence, positions // 128].long(), positions % 128


@settings(deadline=None, max_examples=60)
@given(LENGTHS, WINDOWS, VARIANTS, st.integers(1, 200), st.integers(0, 99))
def test_prompt_chunks_match_the_reference(
    lengths: list[int], window: int | None, variant: str, chunk: int, seed: int
) -> None:
    """All sequences advance by chunks in one flattened batch, in the second layer of the pool."""
    data = Sequences(lengths, seed)
    options = make_options(window, variant)
    for start in range(0, max(lengths), chunk):
        segments, rows = [], 0
        queries, keys, values, places, wanted = [], [], [], [], []
        for sequence, length in enumerate(lengths):
            end = min(start + chunk, length)
            if end <= start:
                continue
            query = data.normal(end - start, HEADS, DIM)
            queries.append(query)
            keys.append(data.keys[sequence][start:end])
            values.append(data.values[sequence][start:end])
            places.append(data.place(sequence, torch.arange(start, end)))
            segments.append(Segment(sequence, rows, start, end - start))
            rows += end - start
            if start + chunk >= length or start == 0:
                wanted.append(
                    (
                        rows - (end - start),
                        reference(
                            query, data.keys[sequence], data.values[sequence], start, options
                        ),
                    )
                )
        pages, offsets = (torch.cat(part) for part in zip(*places, strict=True))
        step = SegmentedStep(data.pool, tuple(segments), data.tables, pages, offsets)
        got = step.attend(1, torch.cat(queries), torch.cat(keys), torch.cat(values), options)
        for row, want in wanted:
            torch.testing.assert_close(
                got[row : row + len(want)].double(), want, atol=2e-5, rtol=1e-4
            )


@settings(deadline=None, max_examples=60)
@given(LENGTHS, WINDOWS, VARIANTS, st.integers(0, 99), st.booleans())
def test_batched_decode_matches_the_reference(
    lengths: list[int], window: int | None, variant: str, seed: int, grouped: bool
) -> None:
    """The padded decode of a GPU, run on the CPU; also when the batch is gathered in groups."""
    data = Sequences(lengths, seed)
    options = make_options(window, variant)
    for sequence, length in enumerate(lengths):
        place = data.place(sequence, torch.arange(length - 1))
        data.pool.keys[0][place] = data.keys[sequence][:-1]
        data.pool.values[0][place] = data.values[sequence][:-1]
    positions = torch.tensor(lengths) - 1
    places = [data.place(s, positions[s]) for s in range(len(lengths))]
    pages, offsets = (torch.stack(part) for part in zip(*places, strict=True))
    width = (max(lengths) - 1) // 128 + 1
    step = DecodeStep(data.pool, data.tables, positions, width, pages, offsets)
    if grouped:
        step.gather_tokens = 128
    query = data.normal(len(lengths), HEADS, DIM)
    got = step.attend(
        0,
        query,
        torch.stack([k[-1] for k in data.keys]),
        torch.stack([v[-1] for v in data.values]),
        options,
    )
    for sequence in range(len(lengths)):
        want = reference(
            query[sequence, None],
            data.keys[sequence],
            data.values[sequence],
            lengths[sequence] - 1,
            options,
        )
        torch.testing.assert_close(got[sequence, None].double(), want, atol=2e-5, rtol=1e-4)


def test_explicit_attention_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Sequences([50], 1)
    options = make_options(None, "sinks")
    query, key, value = data.normal(1, 50, HEADS, DIM), data.keys[0][None], data.values[0][None]
    whole = attend(query, key, value, None, True, options)
    monkeypatch.setattr(attention_math, "_MAX_SCORES", 50 * HEADS * 7)
    torch.testing.assert_close(attend(query, key, value, None, True, options), whole)


def test_causal_attention_with_broadcast_heads_is_the_same() -> None:
    """What a GPU does in float32."""
    data = Sequences([50, 50], 1)
    query = data.normal(2, 50, HEADS, DIM)
    key, value = torch.stack(data.keys), torch.stack(data.values)
    options = make_options(None, "plain")
    want = attend(query, key, value, None, True, options)
    torch.testing.assert_close(attend_causally(query, key, value, options.scaling), want)


@pytest.mark.parametrize("rows", [1, 7, 19, 20])
def test_masked_attention_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """And no call gets a larger mask than it may."""
    data, tokens = Sequences([50], 1), 20
    query, key, value = data.normal(1, tokens, HEADS, DIM), data.keys[0][None], data.values[0][None]
    allowed = torch.ones(1, tokens, 50, dtype=torch.bool).tril(50 - tokens)
    whole = attend(query, key, value, allowed, False, make_options(None, "plain"))
    sizes = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noting(*inputs: torch.Tensor, attn_mask: torch.Tensor, **others: float) -> torch.Tensor:
        sizes.append(attn_mask.numel())
        return real(*inputs, attn_mask=attn_mask, **others)

    monkeypatch.setattr(attention_math, "_MAX_MASK", 50 * rows + 49)
    monkeypatch.setattr(attention_math.functional, "scaled_dot_product_attention", noting)
    got = attend(query, key, value, allowed, False, make_options(None, "plain"))
    torch.testing.assert_close(got, whole)
    assert sum(sizes) == tokens * 50
    assert max(sizes) == 50 * rows


class _Layer(torch.nn.Module):
    layer_idx = 0


class _NeverCalled:
    def attend(self, *args: object) -> torch.Tensor:
        raise AssertionError("must be refused before")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1), "dropout": 0.0}, "indices"),
        ({"is_causal": False}, "bidirectional"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_keywords_that_would_change_the_text_are_refused(
    extra: dict[str, object], named: str
) -> None:
    zeros = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelLoadError, match=named):
        paged_attention(_Layer(), zeros, zeros, zeros, None, paged_step=_NeverCalled(), **extra)
