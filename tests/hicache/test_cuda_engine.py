"""Conversations through scheduler, engine and prefix cache: tokens are those of a run without the cache,
however pages travel, in a pool so small that pages which are being stored are soon wanted again.

It also runs on a CPU, where it tests itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hicache.host_pool import HostPool, PoolGeometry
from hicache.prefix_cache import PrefixCache
from hicache.segment import create_segment
from transport.ids import ProcessName, RequestId
from transport.messages import SamplingParams
from workers.engine_settings import EngineSettings
from workers.prefix_reuse import PrefixReuse
from workers.prefix_transfer import PrefixTransfers
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.torch_engine import TorchEngine, create_torch_engine

VOCAB = 211
PLENTY = 1 << 40
DEVICE_PAGES = 18
OUTPUT = 5
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Rank:
    """What a worker is made of, without its sockets."""

    def __init__(self, engine: TorchEngine, fd: int, host_pages: int) -> None:
        self.engine = engine
        layout = engine.info.layout
        geometry = PoolGeometry(layout.fingerprint, layout.page_bytes, host_pages)
        self.pool = HostPool(fd, geometry, PLENTY)
        self.cache = PrefixCache(
            self.pool, page_tokens=layout.page_tokens, replay_tokens=1, max_pending_bytes=PLENTY
        )
        self.transfers = PrefixTransfers(self.cache, self.pool, engine.cache_copies(self.pool))
        self.scheduler = Scheduler(engine.info, 300, 1, PrefixReuse(self.cache, 0))
        self.got: dict[RequestId, list[int]] = {}
        self.hit_tokens = 0

    def turn(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self.transfers.load(plan.loads)
            self.engine.launch(plan)
            self.transfers.store(plan.stores)
        depth = self.engine.info.pipeline_depth if plan is not None else 0
        if self.scheduler.num_launched > depth:
            output = self.scheduler.apply(self.engine.collect())
            self.hit_tokens += sum(sequence.cached_tokens for sequence in output.started)
            for row in output.rows:
                self.got.setdefault(row.sequence.key[0], []).append(row.token)
        self.transfers.poll()
        return plan is not None or self.scheduler.num_launched > 0 or self.transfers.num_open > 0

    def answer(self, prompts: dict[str, list[int]], with_cache: bool) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            self.scheduler.add(
                Sequence(
                    key=(RequestId(name), 0), frontend=ProcessName("frontend/0"),
                    prompt=np.asarray(prompt, np.int32), prompt_len=len(prompt),
                    sampling=SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True),
                    seed=0, arrival=0.0, uses_prefix_cache=with_cache,
                )
            )  # fmt: skip
        while self.turn():
            pass
        return {name: self.got.pop(RequestId(name)) for name in prompts}

    def close(self) -> None:
        self.engine.close()
        self.transfers.close()
        self.cache.check_integrity()
        self.pool.close()


@pytest.fixture
def open_rank(model_dir) -> Iterator[Callable[..., Rank]]:
    with contextlib.ExitStack() as stack:

        def open_it(accelerator: str, choice: str, host_pages: int) -> Rank:
            if accelerator == "nvidia":
                pytest.importorskip("cuda.core")
            page_bytes = 2 * 2 * 2 * 16 * 4 * 128
            settings = EngineSettings(
                model_dir=str(model_dir), accelerator=accelerator, device_index=0,
                dtype="float32", load_format="auto", max_model_len=None, max_num_seqs=5,
                kv_cache_gb=(DEVICE_PAGES + 0.5) * page_bytes / 1e9, gpu_memory_utilization=0.5,
                max_batched_tokens=300, num_threads=1, report=lambda line: None,
                hicache_copy=choice,
            )  # fmt: skip
            fd = create_segment("test")
            stack.callback(os.close, fd)
            rank = Rank(create_torch_engine(settings), fd, host_pages)
            assert rank.engine.info.num_pages == DEVICE_PAGES
            stack.callback(rank.close)
            return rank

        yield open_it


@pytest.mark.parametrize(
    ("accelerator", "choice"),
    [
        ("cpu", "auto"),
        pytest.param("nvidia", "auto", marks=ON_GPU),
        pytest.param("nvidia", "batch", marks=ON_GPU),
        pytest.param("nvidia", "kernel", marks=ON_GPU),
    ],
)
@pytest.mark.parametrize("host_pages", [9, 60], ids=["evicting", "roomy"])
def test_conversations_get_the_tokens_of_a_run_without_a_cache(
    open_rank, accelerator, choice, host_pages
):
    rank, draw = open_rank(accelerator, choice, host_pages), Random(11)
    system = draw.choices(range(3, VOCAB), k=140)
    conversations = {f"c{n}": list(system) for n in range(4)}
    for turn in range(4):
        for tokens in conversations.values():
            tokens.extend(draw.choices(range(3, VOCAB), k=draw.choice([20, 117, 128, 190])))
        prompts = {f"{name}.{turn}": list(tokens) for name, tokens in conversations.items()}
        plain = rank.answer(prompts, with_cache=False)
        cached = rank.answer(prompts, with_cache=True)
        assert cached == plain
        for name, tokens in conversations.items():
            tokens.extend(plain[f"{name}.{turn}"])
    assert rank.hit_tokens > 4 * 128
    assert rank.transfers.counts["up"].num_bytes > 0
