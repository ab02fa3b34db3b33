"""A request whose tokens end every worker that computes them, beside requests that do no harm."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.instance import ROOT
from tests.support.waiting import eventually

DEADLY = [5, 5, 5]
"""How the prompt begins."""
VOCAB = 256
"""No more than the tiny model's tokenizer has."""
BEYOND = 10**6
"""No token of this model."""
FAULTY_ENGINE = f"""
import ctypes, dataclasses, sys

if "workers.run" in sys.orig_argv:
    from workers.engine.fake import FakeEngine

    set_up, run_chunk = FakeEngine.__init__, FakeEngine._run_chunk

    def checking(self, settings):
        set_up(self, dataclasses.replace(settings, checking=True, vocab_size={VOCAB}))

    def crashing(self, chunk):
        if chunk.start == 0 and chunk.tokens[:3].tolist() == {DEADLY}:
            ctypes.string_at(0)  # what a fault of a kernel or of the driver is for the process
        return run_chunk(self, chunk)

    FakeEngine.__init__, FakeEngine._run_chunk = checking, crashing
"""
"""Python runs it as each process starts. Tokens are then a hash of all before them: a mistake shows."""
TOKENS = 300


@pytest.fixture
def server(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text(FAULTY_ENGINE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    options = dict(engine="fake", dp=2, fake_step_ms=10, routing="least-loaded")
    with serve(forked=False, **options) as server:
        yield server.ready()


def ask(server, prompt: list[int]):
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return server.post("/v1/completions", body)


def answer(reply) -> tuple:
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return choice["text"], choice["finish_reason"], reply.json["usage"]


def lost_workers(server) -> float:
    names = ("worker/0", "worker/1")
    return sum(server.metric("process_restarts_total", process=name) for name in names)


@pytest.mark.slow
def test_a_killer_is_given_up_and_all_others_are_answered_as_if_it_had_not_been(server):
    prompts = [[7, 8, 9 + k] for k in range(6)]
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        wanted = list(pool.map(lambda prompt: answer(ask(server, prompt)), prompts))
        assert len({text for text, *_ in wanted}) == len(prompts)

        others = [pool.submit(ask, server, prompt) for prompt in prompts]
        eventually(
            lambda: sum(row["output_tokens"] > 0 for row in server.ask("requests")) == len(prompts),
            60,
            "all are being answered",
        )
        killer = pool.submit(ask, server, [*DEADLY, 9]).result(120)
        assert (killer.status, killer.json["error"]["code"]) == (500, "worker_lost")
        assert [answer(reply.result(120)) for reply in others] == wanted
    eventually(lambda: lost_workers(server) == 2, 60, "both workers have been replaced")
    server.ready()
    assert server.log.count("signal SIGSEGV") >= 2
    assert answer(ask(server, prompts[0])) == wanted[0]

    for path, body in [
        ("/v1/completions", {"prompt": [7, BEYOND]}),
        ("/v1/completions", {"prompt": [[7], [BEYOND]]}),
        ("/v1/completions", {"prompt": [7, -1]}),
        ("/v1/completions", {"prompt": [7], "stop_token_ids": [BEYOND]}),
        ("/v1/completions", {"prompt": [7], "logit_bias": {str(BEYOND): 1}}),
        ("/detokenize", {"tokens": [BEYOND]}),
    ]:
        assert server.post(path, body).status == 400, (path, body)
    assert lost_workers(server) == 2
