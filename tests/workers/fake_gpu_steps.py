"""Steps as a GPU gets them, on PyTorch's fake tensors, which have a device and a shape but no content.

So what mixes devices, what copies between them and waits, and what asks a GPU for content, shows on a
machine without one. `test_fake_gpu.py` runs this in a process of its own, whose PyTorch knows a device
that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from hicache.layout import CacheLayout
from transport.messages.generate import SamplingParams
from workers.attention.page_pool import PagePool
from workers.contract import DecodeRow, EngineInfo, PromptChunk, StepPlan
from workers.engine import step_buffers
from workers.engine.engine import ModelEngine
from workers.models.deepseek_v41.cache.pools import Caches
from workers.models.deepseek_v41.cache.states import cut_state, load_state
from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.layout.cache_layout import build_cache_layout as describe_caches
from workers.models.deepseek_v41.layout.row_layout import build_row_layout
from workers.models.deepseek_v41.loading.placing import WeightLoader
from workers.models.deepseek_v41.model.model import DeepseekV41
from workers.models.deepseek_v41.model.served import ServedDeepseekV41
from workers.models.deepseek_v41.moe.experts import Experts
from workers.models.deepseek_v41.weights.checkpoint import open_checkpoint
from workers.models.hf.attention_function import ATTENTION_NAME, register
from workers.models.hf.model import HfModel
from workers.models.hf.page_layout import build_cache_layout, layer_shapes

# A PyTorch without CUDA makes no tensors of that device, not even fake ones.
_setup_privateuseone_for_python_backend("fakegpu")
GPU, CPU = torch.device("fakegpu", 0), torch.device("cpu")
DATA = Path(__file__).parents[1] / "data"
COMMON = dict(
    vocab_size=211, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=1024, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "window": lambda: MistralConfig(**COMMON, sliding_window=40, head_dim=16),
    "soft caps": lambda: Gemma2Config(**COMMON, head_dim=16, sliding_window=48),
    "sinks": lambda: GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=36
    ),
}
EVERYTHING = SamplingParams(
    max_tokens=9, temperature=0.8, top_p=0.9, top_k=9, min_p=0.01, repetition_penalty=1.1,
    logprobs=2, logit_bias=((3, 1.0),), min_tokens=5,
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Lets nothing pass that a GPU would refuse or wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = tensors((args, kwargs))
        devices = {t.device.type for t in inputs if t.dim()}
        if func is torch.ops.aten.copy_.default and len(devices) == 2:
            assert args[2:] == (True,), f"{func} waits for a copy"
            return func(*args, **(kwargs or {}))
        assert len(devices) < 2, f"{func} gets tensors of {devices}"
        result = func(*args, **(kwargs or {}))
        moves = devices and any(t.device.type not in devices for t in tensors(result))
        assert not moves or kwargs.get("non_blocking"), f"{func} waits for a copy"
        return result


def tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def host_words(count: int, *, page_locked: bool) -> step_buffers.HostWords:
    """A fake tensor has no memory that an array could share."""
    assert page_locked
    return step_buffers.HostWords(torch.zeros(count, dtype=torch.int32), np.zeros(count, np.int32))


@pytest.fixture
def fake_gpu(monkeypatch) -> Iterator[FakeTensorMode]:
    """Within it, tensors of the GPU can be made, and those of the CPU are as good as page-locked."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(step_buffers, "host_words", host_words)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        yield mode


def plans() -> list[StepPlan]:
    """Two first chunks, a later one that ends, and a decode that grows by a page."""

    def chunk(slot: int, start: int, end: int, length: int) -> PromptChunk:
        ids = np.arange(length, dtype=np.int32) % 50
        return PromptChunk(
            slot, start, ids[start:end], tuple(range(4 * slot, 4 * slot + 4)), end == length,
            start == 0, EVERYTHING, 1, length, ids, replay_from=max(0, length - 24),
        )  # fmt: skip

    return [
        StepPlan(0, prompts=(chunk(0, 0, 100, 300), chunk(1, 0, 60, 60))),
        StepPlan(1, prompts=(chunk(0, 100, 300, 300),)),
        StepPlan(2, decodes=(DecodeRow(0, 300), DecodeRow(1, 60)), new_pages=((0, 3, 9),)),
    ]


def mover(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings a real tensor, of the CPU, to the GPU."""
    return lambda tensor: mode.from_tensor(tensor.detach()).to(GPU)


def move_module(moved: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(moved(parameter), requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = moved(buffer)


def info(layout: CacheLayout, vocab_size: int, depth: int) -> EngineInfo:
    return EngineInfo(
        layout, num_pages=40, max_num_seqs=4, max_model_len=8 * 128, vocab_size=vocab_size,
        eos_token_ids=(2,), pipeline_depth=depth, device="fakegpu",
    )  # fmt: skip


def run(engine: ModelEngine) -> None:
    """All of `plans`, but for the wait for their tokens."""
    with Watch():
        for plan in plans():
            slots, sampled = engine._compute(engine._open(), plan)
            assert len(slots) == len(sampled.tokens)
            landing = torch.zeros(len(slots), dtype=torch.int64)
            assert sampled.to_host(landing).tokens.device == CPU


@pytest.mark.parametrize("name", CONFIGS)
def test_a_transformers_model_keeps_to_the_gpu(request, name):
    config: PreTrainedConfig = CONFIGS[name]()
    register()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_attn_implementation(ATTENTION_NAME)
    mode = request.getfixturevalue("fake_gpu")  # the weights had to be real ones
    move_module(mover(mode), model)
    layout = build_cache_layout(layer_shapes(config), "bfloat16", config, "weights")
    served = HfModel(model, PagePool(layout, 40, GPU), None)
    run(ModelEngine(served, info(layout, config.vocab_size, 1), GPU, 512))


class FakeLookup:
    """Of Engram rows, which come from the host."""

    def __init__(self, config) -> None:
        self._layers = config.engram_layer_ids
        self._width = config.engram_row_count * config.engram_head_dim

    def begin(self, slot, known, start) -> None:
        pass

    def prompts(self, chunks) -> Mapping[int, torch.Tensor]:
        return self._rows(sum(len(tokens) for _, _, tokens in chunks))

    def decodes(self, slots, tokens) -> Mapping[int, torch.Tensor]:
        return self._rows(len(slots))

    def _rows(self, count: int) -> Mapping[int, torch.Tensor]:
        shape = (count, self._width)
        return {i: torch.zeros(shape, dtype=torch.bfloat16, device=GPU) for i in self._layers}


@pytest.mark.parametrize("kv_format", ["compact", "bfloat16"])
def test_deepseek_v41_keeps_to_the_gpu(request, kv_format):
    """Packed experts and Engram among it; a state is cut and put back as well."""
    config = read_config(DATA / "v41_tiny_quant", {})
    model = DeepseekV41(config, torch.bfloat16, CPU)
    checkpoint = open_checkpoint(DATA / "v41_tiny_quant", config)
    WeightLoader(model, checkpoint, torch.bfloat16, CPU).load()
    moved = mover(request.getfixturevalue("fake_gpu"))
    move_module(moved, model)
    for module in model.modules():
        if isinstance(module, Experts):
            module._stacks = {name: moved(stack) for name, stack in module._stacks.items()}
    for rope in (model.window_rope, model.compressed_rope):
        rope.frequencies = moved(rope.frequencies)
    layout = build_row_layout(config, kv_format, 24, store_anchors=True)
    caches = Caches(config, layout, 40, 4, GPU, torch.bfloat16)
    served = ServedDeepseekV41(model, caches, FakeLookup(config), batch_invariant=False)
    described = describe_caches(config, layout, 24, "bfloat16", "weights")
    run(ModelEngine(served, info(described, config.vocab_size, 0), GPU, 512))
    with Watch():
        load_state(caches, 2, cut_state(caches, 0, 256, 301), 256)


def test_what_a_step_was_told_stays_while_the_next_is_launched(fake_gpu):
    """The copy to the GPU may not have run yet."""
    buffers = step_buffers.StepBuffers(GPU, 1, 8, 2, 4)
    told = []
    for step in range(4):
        buffers.begin()
        buffers.put(np.full(3, step, np.int32))
        buffers.send()
        told.append(buffers._mirrors[buffers._turn].array)
        assert told[step][0] == step
        assert step == 0 or told[step - 1][0] == step - 1


def test_the_watch_sees_what_a_gpu_would_wait_for_or_refuse(fake_gpu):
    on_gpu, on_cpu = torch.zeros(3, device=GPU), torch.zeros(3)
    with Watch():
        buffers = step_buffers.StepBuffers(GPU, 1, 8, 2, 4)
        buffers.begin()
        assert buffers.put(np.zeros(3, np.int32)).device == GPU
        buffers.send()
        with pytest.raises(AssertionError, match="waits for a copy"):
            on_gpu.copy_(on_cpu)
        with pytest.raises(AssertionError, match="gets tensors of"):
            on_gpu[on_cpu.long()]
        with pytest.raises(AssertionError, match="waits for a copy"):
            on_gpu.cpu()
        with pytest.raises(DataDependentOutputException):
            on_gpu.sum().item()
