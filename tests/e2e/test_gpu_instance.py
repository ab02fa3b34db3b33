"""An instance on a GPU gives what transformers gives, through HTTP and all processes."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.greedy_reference import greedy_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NEW_TOKENS = 24
ON_GPU = {"accelerator": "nvidia", "dtype": "float32", "hicache_size_gb": 0.25}
"""A prefix cache of the default size takes a while to page-lock at each start."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, 250, (size,), generator=generator).tolist()
        for size in (1, 5, 124, 126, 127, 128, 129, 300)
    ]


@pytest.fixture(scope="module")
def wanted(tiny_dir, prompts) -> list[list[int]]:
    return greedy_reference(tiny_dir, prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    "options", [{}, {"max_batched_tokens": 48}, {"kv_cache_gb": 0.00082, "max_model_len": 1024}],
    ids=["batched", "small chunks", "preempted"],
)  # fmt: skip
def test_greedy_answers_equal_generate(serve, prompts, wanted, options):
    with serve(forked=False, **ON_GPU, max_num_seqs=8, **options) as server:
        server.ready()
        assert server.ask("status")["accelerator"] == "nvidia"

        def answer(ids: list[int]) -> str:
            body = {
                "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            reply = server.post("/v1/completions", body, {"Content-Type": "application/json"})
            assert reply.status == 200, reply.body
            assert reply.json["usage"]["completion_tokens"] == NEW_TOKENS
            return reply.json["choices"][0]["text"]

        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(answer, prompts))
        told = [
            server.post("/detokenize", {"tokens": ids}, {"Content-Type": "application/json"}).json
            for ids in wanted
        ]
        # The answers leave special tokens out of the text; so must what they are compared with.
        for text, tokens in zip(texts, told, strict=True):
            plain = tokens["prompt"]
            for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
                plain = plain.replace(special, "")
            assert text == plain
        memory = {row["name"]: row["gpu_memory_bytes"] for row in server.ask("processes")}
        assert [name for name, taken in memory.items() if taken] == ["worker/0"]
        if "kv_cache_gb" in options:
            assert server.metric("num_preemptions_total") > 0


def test_a_killed_worker_costs_no_token_on_a_gpu(serve, prompts):
    with serve(forked=False, **ON_GPU) as server:
        server.ready()
        body = {"prompt": prompts[2], "max_tokens": 400, "temperature": 0.8, "seed": 5,
                "ignore_eos": True}  # fmt: skip
        json_type = {"Content-Type": "application/json"}
        undisturbed = server.post("/v1/completions", body, json_type).json["choices"][0]["text"]
        pid = server.pids()["worker/0"]
        pieces = []
        with server.stream("/v1/completions", body) as stream:
            for piece in stream.pieces():
                pieces.append(piece)
                if len(pieces) == 5:
                    os.kill(pid, signal.SIGKILL)
        assert "".join(pieces) == undisturbed
