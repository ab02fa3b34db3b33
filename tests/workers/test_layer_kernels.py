"""The Triton kernels between a layer's products, and the draws, against their PyTorch references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.triton_kernels import DEVICE, MARKS
from workers.kernels.layer_ops import HeadShape, LayerOps, Norm, TorchLayerOps
from workers.kernels.triton.layer_ops import TritonLayerOps
from workers.sampling.logit_processing import draw, filter_probabilities
from workers.sampling.triton.draw import draw_tokens

pytestmark = MARKS
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCES)


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_like(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    scale = max(1.0, float(theirs.float().abs().max()))
    difference = float((ours.float() - theirs.float()).abs().max())
    assert difference <= TOLERANCES[theirs.dtype] * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 1000])
@pytest.mark.parametrize("rounds_first", [True, False])
def test_norms(dtype: torch.dtype, width: int, rounds_first: bool) -> None:
    x, residual = (random(5, width, dtype=dtype, seed=i) for i in range(2))
    gains = random(width, dtype=dtype if rounds_first else torch.float32, seed=3) + 1
    norm = Norm(gains, 1e-5, rounds_first)
    ours, theirs = TritonLayerOps(), TorchLayerOps()
    assert_like(ours.norm(x, norm), theirs.norm(x, norm))
    for ours_part, theirs_part in zip(
        ours.add_norm(x, residual, norm), theirs.add_norm(x, residual, norm), strict=True
    ):
        assert_like(ours_part, theirs_part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [HeadShape(6, 2, 24), HeadShape(12, 12, 64), HeadShape(1, 1, 16)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_leaves_values_alone(
    dtype: torch.dtype, shape: HeadShape, has_norms: bool
) -> None:
    qkv = random(7, shape.width, dtype=dtype, seed=1)
    rotary = (random(7, shape.dim, dtype=dtype, seed=2), random(7, shape.dim, dtype=dtype, seed=3))
    norms = None
    if has_norms:
        query, key = (Norm(random(shape.dim, dtype=dtype, seed=i) + 1, 1e-6) for i in (4, 5))
        norms = query, key
    value = shape.split(qkv)[2].clone()
    theirs = TorchLayerOps().rotate(qkv.clone(), shape, rotary, norms)
    ours = TritonLayerOps().rotate(qkv, shape, rotary, norms)
    assert_like(ours, theirs)
    assert torch.equal(shape.split(ours)[2], value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products(dtype: torch.dtype, activation: str) -> None:
    x, weight = random(5, 48, dtype=dtype, seed=1), random(2 * 1100, 48, dtype=dtype, seed=2) / 8
    bias = random(2 * 1100, dtype=dtype, seed=3)

    def product(ops: LayerOps, bias: Tensor | None) -> Tensor:
        return ops.gated_linear(x, weight, bias, activation)  # type: ignore[arg-type]

    for added in (None, bias):
        assert_like(product(TritonLayerOps(), added), product(TorchLayerOps(), added))


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize("has_ties", [False, True])
def test_draws_are_those_of_the_reference(vocabulary: int, has_ties: bool) -> None:
    """With every mix of filters, of rows in any order."""
    count = 24
    randoms = np.random.default_rng(vocabulary)
    logits = random(count, vocabulary, dtype=torch.float32, seed=vocabulary) * 3
    if has_ties:
        logits = logits.round()
    rows = torch.from_numpy(randoms.permutation(count).astype(np.int32))[: count - 3].to(DEVICE)
    some = torch.arange(len(rows), device=DEVICE)
    temperature = torch.from_numpy(randoms.uniform(0.1, 1.6, len(rows))).float().to(DEVICE)
    top_k = torch.from_numpy(randoms.integers(1, 40, len(rows))).float().to(DEVICE)
    top_p = torch.from_numpy(randoms.uniform(0.1, 1, len(rows))).float().to(DEVICE)
    min_p = torch.from_numpy(randoms.uniform(0, 0.1, len(rows))).float().to(DEVICE)
    top_k[some % 3 == 0], top_p[some % 2 == 0], min_p[some % 4 == 0] = 0, 1, 0
    bits = randoms.integers(0, 2**32, len(rows), dtype=np.uint32).view(np.int32)
    words = torch.from_numpy(bits).to(DEVICE)
    probabilities = (logits[rows.long()] / temperature[:, None]).softmax(-1)
    kept = filter_probabilities(probabilities, top_k.long(), top_p, min_p, ranked=True)
    drawn = draw_tokens(logits, rows, torch.stack([temperature, top_k, top_p, min_p], 1), words)
    chosen = kept.gather(1, drawn[:, None])[:, 0]
    assert bool((chosen > 0).all()), "a token that the filters exclude"
    # A word that falls on a border between two tokens may fall to either side.
    assert int((drawn != draw(kept, words)).sum()) <= (0 if DEVICE.type == "cpu" else 1)
