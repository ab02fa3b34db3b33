"""Conversations through scheduler, engine and prefix cache: tokens are those of a run without the cache,
however pages travel, in a pool so small that pages which are being stored are soon wanted again.

It also runs on a CPU, where it tests itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from hicache.copies.copy_choice import CopyChoice
from hicache.copies.open import open_cache_copies
from hicache.manager.host import HostPrefixCache
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment
from tests.support.engines import open_engine, save_random_llama
from transport.ids import ProcessName, RequestId
from transport.messages.generate import Generate, SamplingParams
from transport.telemetry.metrics import MetricSet
from workers.contract import Engine
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence

VOCAB = 211
PLENTY = 1 << 40
OUTPUT = 5
V41_TINY = Path(__file__).parents[1] / "data" / "v41_tiny"
KV_CACHE_GB = {"llama": 18.5 * 65_536 / 1e9, "deepseek_v41": 18.5 * 98_304 / 1e9}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("llama"), VOCAB)


class Rank:
    """What a worker is made of, without its sockets."""

    def __init__(self, engine: Engine, fd: int, host_pages: int, choice: CopyChoice) -> None:
        self.engine = engine
        layout = engine.info.layout
        states = host_pages if layout.stored_state_bytes else 0
        geometry = PoolGeometry(
            layout.fingerprint, layout.page_bytes, host_pages, layout.stored_state_bytes, states
        )
        self.pool = HostPool(fd, geometry, PLENTY)
        pool = self.pool
        copies = open_cache_copies(
            engine.device_cache(), pool.memory, pool.pages, pool.states, choice
        )
        manager = HostPrefixCache(self.pool, layout, copies, MetricSet(), PLENTY)
        self.cache, self.transfers = manager.cache, manager.transfers
        self.scheduler = Scheduler(engine.info, 300, 1, manager.reuse)
        self.got: dict[RequestId, list[int]] = {}
        self.hit_tokens = 0

    def turn(self) -> bool:
        step = self.scheduler.next_step()
        if step is not None:
            self.transfers.load(step.plan.loads, step.plan.written_pages)
            step.launched = self.engine.launch(step.plan)
            self.transfers.store(step.plan.stores)
        depth = self.engine.info.pipeline_depth if step is not None else 0
        if self.scheduler.num_in_flight > depth:
            output = self.scheduler.collect()
            self.hit_tokens += sum(s.prefix.cached_tokens for s in output.step.started)
            for row in output.rows:
                self.got.setdefault(row.sequence.key[0], []).append(row.token)
        self.transfers.poll()
        return step is not None or self.scheduler.num_in_flight > 0 or self.transfers.num_open > 0

    def answer(self, prompts: dict[str, list[int]], with_cache: bool) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            self.scheduler.add(
                Sequence(
                    key=(RequestId(name), 0), frontend=ProcessName("frontend/0"),
                    prompt=np.asarray(prompt, np.int32), prompt_len=len(prompt),
                    generate=Generate(
                        SamplingParams(OUTPUT, temperature=0, ignore_eos=True),
                        prefix_cache=with_cache,
                    ),
                    seed=0, arrival=0.0,
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

        def open_it(model: str, accelerator: str, choice: str, host_pages: int) -> Rank:
            if accelerator == "nvidia":
                pytest.importorskip("cuda.core")
            engine = open_engine(
                model_dir if model == "llama" else V41_TINY,
                accelerator=accelerator, max_model_len=1024, max_num_seqs=5,
                kv_cache_gb=KV_CACHE_GB[model], gpu_memory_utilization=0.5, max_batched_tokens=300,
                keep_tokens=24, stores_prefixes=True,
            )  # fmt: skip
            fd = create_segment("test")
            stack.callback(os.close, fd)
            rank = Rank(engine, fd, host_pages, choice)
            # Four conversations of up to nine pages want more.
            assert 8 <= rank.engine.info.num_pages <= 20
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
@pytest.mark.parametrize("model", ["llama", pytest.param("deepseek_v41", marks=pytest.mark.slow)])
@pytest.mark.parametrize("host_pages", [9, 60], ids=["evicting", "roomy"])
def test_conversations_get_the_tokens_of_a_run_without_a_cache(
    open_rank, model, accelerator, choice, host_pages
):
    """With a state of sliding windows beside the pages, and without."""
    rank, draw = open_rank(model, accelerator, choice, host_pages), Random(11)
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
    assert rank.transfers.counts["load"].num_bytes > 0
