"""What flows between the layers, against the golden file: where a wrong number first appears."""

import pytest
import torch

from workers.models.deepseek_v41.attention.attention import Attention
from workers.models.deepseek_v41.attention.indexer import TopKSelector
from workers.models.deepseek_v41.model.model import Layer
from workers.models.deepseek_v41.moe.moe import Gate, MoE


@pytest.fixture(scope="module")
def seen(make_driver, golden):
    """Everything that one pass over the 37-token prompt computes, by name."""
    driver = make_driver()
    found: dict[str, torch.Tensor] = {}
    network = driver.network
    layer_of = {}
    for i, layer in enumerate(network.layers):
        for module in (layer, layer.attn, layer.ffn, layer.ffn.gate):
            layer_of[module] = i

    def record(patch, owner, name, take):
        original = getattr(owner, name)

        def recorded(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            take(layer_of.get(self), args, result)
            return result

        patch.setattr(owner, name, recorded)

    def layer_input(i, args, result):
        found[f"layers.{i}.in_streams"], found[f"layers.{i}.in_pre_mix"] = result[0], args[1]

    def experts(i, args, result):
        order = result[0].argsort(1)
        found[f"layers.{i}.expert_ids"] = result[0].gather(1, order)
        found[f"layers.{i}.expert_weights"] = result[1].gather(1, order)

    def choice(_, args, result):
        role = args[0]
        entries = 128 // role.ratio
        found[f"layers.{role.layer}.topk"] = torch.where(
            result.address >= 0, result.address % entries, -1
        )
        if result.candidates is not None:
            size = network.config.candidate_block_size
            found["candidates"] = result.candidates.repeat_interleave(size, 1)[:, :37]

    def put(part):
        return lambda i, args, result: found.update({f"layers.{i}.{part}": result})

    with pytest.MonkeyPatch.context() as patch:
        record(patch, Layer, "attention_input", layer_input)
        record(patch, Attention, "output", put("attn_out"))
        record(patch, MoE, "forward", put("ffn_out"))
        record(patch, Gate, "forward", experts)
        record(patch, TopKSelector, "select", choice)
        prompt = driver.prompt(golden("v41_tiny", "golden")["p37.input_ids"])
        driver.prefill(prompt)
    caches, page = driver.caches, torch.tensor([[prompt.pages[0]]])
    for source in network.config.kv_source_layer_ids:
        count = 37 // network.config.compress_ratios[source]
        entries = 128 // network.config.compress_ratios[source]
        address = prompt.pages[0] * entries + torch.arange(count)
        found[f"layers.{source}.compressed_kv"] = caches.main_kv(source, address)
        found[f"layers.{source}.index_k"] = caches.index_keys(source, page)[0, :count]
    return found


@pytest.mark.parametrize("layer", range(10))
def test_every_layer_meets_the_golden_values(seen, golden, layer):
    expected = {
        name: value
        for name, value in golden("v41_tiny", "intermediates_p37").items()
        if name.startswith(f"layers.{layer}.") and not name.endswith("candidates")
    }
    order = expected[f"layers.{layer}.expert_ids"].argsort(1)
    assert len(expected) >= 6
    for name, value in expected.items():
        wanted = value
        if "expert" in name:
            wanted = value.gather(1, order)
        if wanted.dtype == torch.int32:
            assert torch.equal(seen[name], wanted.long()), name
        else:
            torch.testing.assert_close(seen[name], wanted, atol=1e-4, rtol=1e-4, msg=name)


def test_the_candidates_are_the_golden_ones(seen, golden):
    wanted = golden("v41_tiny", "intermediates_p37")["layers.6.candidates"].bool()
    visible = torch.ones(37, 37, dtype=torch.bool).tril()
    assert torch.equal(seen["candidates"] & visible, wanted & visible)
    assert not wanted[visible].all()
