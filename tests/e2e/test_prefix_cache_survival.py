"""The host pool outlives its worker, and nothing outlives the daemon."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from benchmarks.process_session import session_members
from tests.support.waiting import eventually

PAGE = 128
SHARED_MEMORY = Path("/dev/shm")
LONG_PROMPT = "hello the night is young, or so they say. " * 12


def complete(server, **fields) -> tuple[int, str]:
    """Cached tokens and text of a greedy completion."""
    body = {"prompt": LONG_PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]["prompt_tokens_details"]
    return usage["cached_tokens"], answer.json["choices"][0]["text"]


@pytest.mark.slow
def test_new_workers_hit_what_killed_ones_had_stored(serve):
    # Deterministic: what is computed anew in larger steps must not part at a near tie.
    with serve(kv_cache_gb=0.01, hicache_size_gb=0.01, deterministic=True) as server:
        server.ready()
        _, wanted = complete(server, prefix_cache=False, max_tokens=900)
        body = {"prompt": LONG_PROMPT, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
        worker = server.pids()["worker/0"]
        with server.stream("/v1/completions", body) as stream:
            pieces = stream.pieces()
            got = [next(pieces)]  # so its prompt is stored
            os.kill(worker, signal.SIGKILL)
            got += pieces
        assert "".join(got) == wanted
        server.ready()
        eventually(lambda: server.metric("hicache_hits_total"), 60, "it went on from the pool")
        stored = server.metric("hicache_recovered_pages")
        assert stored > 0

        worker = server.pids()["worker/0"]
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: server.pids()["worker/0"] not in (worker, None), 60, "a new worker")
        server.ready()
        cached, text = complete(server)
        assert cached == stored * PAGE
        assert wanted.startswith(text)
        eventually(lambda: server.metric("hicache_recovered_pages"), 60, "it recovered them too")
        server.post("/deepinfer/cache/flush", {})
        assert complete(server) == (0, text)


def test_a_killed_daemon_leaves_no_shared_memory(serve):
    with serve(kv_cache_gb=0.01, hicache_size_gb=0.01) as server:
        server.ready()
        segments = set(SHARED_MEMORY.iterdir())
        complete(server)
        pid = server.process.pid
        assert pool_mappings(session_members(pid), server.instance) == 1
        server.signal(signal.SIGKILL)
        server.wait()
        eventually(lambda: not session_members(pid), 60, "all processes have ended")
        # The pool has no name that could stay: it is there as long as somebody holds it.
        assert set(SHARED_MEMORY.iterdir()) <= segments
        assert not any(server.instance in entry.name for entry in segments)
        shutil.rmtree(server.run_dir)


def pool_mappings(pids, instance: str) -> int:
    """Processes that have mapped the instance's pool."""
    return sum(f"deepinfer-{instance}-" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
