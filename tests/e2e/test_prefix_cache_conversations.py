"""Random conversations, interleaved, edited and abandoned, through a pool of a few pages."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from benchmarks.clients.requests import CHAT, COMPLETIONS, Answer, Asked, ask
from benchmarks.leaks import held_when_idle
from tests.support.waiting import eventually

CONVERSATIONS = 10
TURNS = 4
PAGE_BYTES = 65_536
HOST_PAGES = 7
DEVICE_PAGES = 12
WORDS = ("hello", "the", "rain", "tea", "night", "é", "한", "🙂", "seven", "lamp", "or", "?")
SYSTEM = [
    "You are a lamp in the rain. " * 6,
    "Say hello to the seven nights, or drink tea. " * 4,
]


def some_text(draw: Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


async def converse(port: int, draw: Random, seen: Counter) -> None:
    """Each turn with the cache equals the same turn without it."""
    messages = [{"role": "system", "content": draw.choice(SYSTEM)}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": some_text(draw, draw.choice((3, 15, 30)))})
        if len(messages) > 3 and draw.random() < 0.3:
            place = draw.randrange(1, len(messages) - 1)
            messages[place] = {**messages[place], "content": some_text(draw, 12)}
            seen["edited"] += 1
        length = draw.choice((1, 12, 140))
        body = {"messages": messages, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        if draw.random() < 0.3:
            leave_after = draw.randrange(3000)
            left = await ask(port, Asked(CHAT, body), stream=True, leave_after=leave_after)
            seen["abandoned"] += left is None
        streamed, at_once = draw.random() < 0.5, draw.random() < 0.5
        with_cache = asyncio.create_task(answer(port, body, streamed))
        if not at_once:
            await with_cache
        without = await answer(port, {**body, "prefix_cache": False}, stream=False)
        got = await with_cache
        assert got.result() == without.result(), (body, got, without)
        seen["turns"] += 1
        messages.append({"role": "assistant", "content": without.choices[0].text or "?"})


async def answer(port: int, body: dict, stream: bool, path: str = CHAT) -> Answer:
    found = await ask(port, Asked(path, body), stream)
    assert found is not None and found.complete, found
    return found


async def converse_all(port: int, seed: int, seen: Counter) -> None:
    """All at once, beside a few that need more pages together than the device has."""
    body = {"prompt": "hello", "max_tokens": 700, "temperature": 0, "ignore_eos": True}
    growing = [asyncio.create_task(answer(port, body, True, COMPLETIONS)) for _ in range(3)]
    await asyncio.gather(
        *(converse(port, Random(seed * 1000 + number), seen) for number in range(CONVERSATIONS))
    )
    assert len({(await task).result() for task in growing}) == 1


@pytest.mark.slow
def test_answers_do_not_depend_on_the_cache_and_nothing_is_left(serve):
    options = dict(
        kv_cache_gb=(DEVICE_PAGES + 0.5) * PAGE_BYTES / 1e9,
        hicache_size_gb=(HOST_PAGES + 0.5) * PAGE_BYTES / 2**30,
        max_num_seqs=6, max_batched_tokens=96,
        deterministic=True,  # else near ties fall differently beside other sequences
    )  # fmt: skip
    with serve(**options) as server:
        server.ready()
        pids = server.pids()
        seen: Counter[str] = Counter()
        asyncio.run(converse_all(server.address[1], 1, seen))
        assert held_when_idle(server.run_dir, 20) == {}
        eventually(lambda: not server.metric("hicache_pending_bytes"), 60, "all stores are over")
        print(seen)
        assert seen["turns"] == CONVERSATIONS * TURNS
        assert seen["edited"] > 3 < seen["abandoned"]
        eventually(lambda: server.metric("hicache_hits_total") > 5, 60, "hits")
        assert server.metric("hicache_pages") == HOST_PAGES
        evicted = "hicache_evicted_pages_total"
        eventually(lambda: server.metric(evicted) > 3 * HOST_PAGES, 60, "it was short of room")
        eventually(lambda: server.metric("num_preemptions_total") > 0, 60, "so was the device")
        assert server.pids() == pids
        assert "Traceback" not in server.log
