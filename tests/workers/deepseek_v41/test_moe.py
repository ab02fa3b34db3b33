"""Mixture of experts: packed weights, and tiles that no expert's rows get lost in."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.moe.experts import EXPERT_MATRICES, Experts
from workers.models.deepseek_v41.moe.moe import routed_experts, swiglu, tile_rows
from workers.models.deepseek_v41.weights.formats import dequantize_fp4

COUNT, WIDTH, HIDDEN = 5, 64, 32
CONFIG = read_config(
    Path(__file__).parents[2] / "data" / "v41_tiny",
    {"n_routed_experts": COUNT, "hidden_size": WIDTH},
)


def shape(name: str) -> tuple[int, int]:
    return (WIDTH, HIDDEN) if name == "w2" else (HIDDEN, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_experts_are_decoded_exactly(dtype):
    experts = Experts(CONFIG)
    random = torch.Generator().manual_seed(0)
    stored = {}
    for expert in range(COUNT):
        for name in EXPERT_MATRICES:
            out, inputs = shape(name)
            data = torch.randint(256, (out, inputs // 2), dtype=torch.uint8, generator=random)
            scale = torch.randint(
                110, 130, (out, inputs // 32), dtype=torch.uint8, generator=random
            )
            experts.put(name, expert, data)
            assert not experts.complete
            experts.put(f"{name}_scale", expert, scale.view(torch.float8_e8m0fnu))
            stored[name, expert] = dequantize_fp4(data, scale, dtype)
    assert experts.complete
    ids = torch.tensor([4, 0, 4])
    for name in EXPERT_MATRICES:
        wanted = torch.stack([stored[name, int(i)] for i in ids])
        assert torch.equal(experts.matrices(name, ids, dtype), wanted)


@given(
    rows=st.integers(1, 40),
    top=st.integers(1, 4),
    tile=st.sampled_from([1, 2, 4, 8, 32, None]),
    crowded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tiles_give_what_a_loop_over_tokens_gives(rows, top, tile, crowded, seed):
    experts = Experts(CONFIG)
    random = torch.Generator().manual_seed(seed)
    weights = {
        (name, i): torch.randn(shape(name), generator=random) / 8
        for name in EXPERT_MATRICES
        for i in range(COUNT)
    }
    for (name, i), weight in weights.items():
        experts.put(name, i, weight)
    x = torch.randn(rows, WIDTH, generator=random)
    preference = torch.rand(rows, COUNT, generator=random)
    if crowded:
        preference[:, 0] = 2  # everybody chooses the first expert
    chosen = preference.topk(top).indices
    scale = torch.rand(rows, top, generator=random)
    got = routed_experts(experts, x, chosen, scale, 2.0, tile or tile_rows(rows * top, COUNT))
    wanted = torch.zeros(rows, WIDTH)
    for row in range(rows):
        for expert, factor in zip(chosen[row].tolist(), scale[row], strict=True):
            gate = x[row] @ weights["w1", expert].T
            up = x[row] @ weights["w3", expert].T
            wanted[row] += swiglu(gate, up, 2.0) * factor @ weights["w2", expert].T
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
