"""What a client sees of the prefix cache: what hits, what must not, and that no text changes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from tests.support.waiting import eventually

V41_TINY = Path(__file__).parents[1] / "data/v41_tiny"
PAGE = 128
NEW_TOKENS = 6
LEAST_GAP = 3e-4


def some_ids(count: int, seed: int) -> list[int]:
    """Token ids that any of the models has and that end nothing."""
    return Random(seed).choices(range(30, 220), k=count)


def complete(server, prompt: list[int] | str, headers=None, **fields) -> dict:
    """A greedy completion, checked to be one, and that no choice was so close that it could fall
    otherwise where a hit or another processor moves the logits a little."""
    body = {
        "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": 2, **fields,
    }  # fmt: skip
    answer = server.post("/v1/completions", body, headers or {})
    assert answer.status == 200, answer.body
    for step in answer.json["choices"][0]["logprobs"]["top_logprobs"]:
        if len(step) > 1:  # tokens of the same text share an entry
            best, second = sorted(step.values(), reverse=True)[:2]
            assert best - second > LEAST_GAP, "take another prompt"
    return answer.json


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def text(answer: dict) -> str:
    return answer["choices"][0]["text"]


def is_right(server, prompt, answer: dict, **fields) -> bool:
    """Whether the cache is told off gives the same answer."""
    plain = complete(server, prompt, prefix_cache=False, **fields)
    assert cached(plain) == 0
    return text(answer) == text(plain)


# ---- a model without states ------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "hit"), [(127, 0), (128, 0), (129, 128), (300, 256)])
def test_the_same_prompt_again_hits_all_full_pages_but_its_last_token(chat_server, length, hit):
    prompt = some_ids(length, seed=length)
    cold, again = complete(chat_server, prompt), complete(chat_server, prompt)
    assert (cached(cold), cached(again)) == (0, hit)
    assert text(cold) == text(again)
    assert is_right(chat_server, prompt, again)


@pytest.mark.parametrize("length", [127, 128, 129])
def test_the_next_turn_hits_the_full_pages_of_the_last_prompt(chat_server, length):
    first = some_ids(length, seed=1000 + length)
    complete(chat_server, first)
    longer = first + some_ids(150, seed=2000 + length)
    answer = complete(chat_server, longer)
    assert cached(answer) == length // PAGE * PAGE
    assert is_right(chat_server, longer, answer)
    # What the turn added is stored as well, what it generated is not.
    assert cached(complete(chat_server, longer + some_ids(9, seed=3))) == len(longer) // PAGE * PAGE


def test_an_edit_hits_up_to_the_page_before_it(chat_server):
    prompt = some_ids(400, seed=4)
    complete(chat_server, prompt)
    edited = prompt.copy()
    edited[300] += 1
    answer = complete(chat_server, edited)
    assert cached(answer) == 256
    assert is_right(chat_server, edited, answer)


def test_a_chat_reports_its_hit_streamed_and_plain(chat_server):
    messages = [{"role": "user", "content": "Tell me about lighthouses, please. " * 30}]
    body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0}
    first = chat_server.post("/v1/chat/completions", body).json
    assert cached(first) == 0
    options = {"stream_options": {"include_usage": True}}
    with chat_server.stream("/v1/chat/completions", body | options) as stream:
        events = list(stream.events())
    usage = events[-1]["usage"]
    wanted = (usage["prompt_tokens"] - 1) // PAGE * PAGE
    assert usage["prompt_tokens_details"]["cached_tokens"] == wanted > 0
    pieces = [choice["delta"].get("content", "") for e in events for choice in e["choices"]]
    assert "".join(pieces) == first["choices"][0]["message"]["content"]


def test_a_salt_separates(chat_server):
    prompt = some_ids(200, seed=5)
    salts = ["", "one", "two", "one", "two", ""]
    answers = [complete(chat_server, prompt, **({"cache_salt": s} if s else {})) for s in salts]
    assert [cached(answer) for answer in answers] == [0, 0, 0, 128, 128, 128]
    assert len({text(answer) for answer in answers}) == 1


def test_without_the_cache_nothing_is_read_and_nothing_stored(chat_server):
    prompt = some_ids(200, seed=6)
    complete(chat_server, prompt, prefix_cache=False)
    assert cached(complete(chat_server, prompt)) == 0
    assert cached(complete(chat_server, prompt, prefix_cache=False)) == 0
    assert cached(complete(chat_server, prompt)) == 128


def test_a_flush_empties_it(chat_server):
    prompt = some_ids(300, seed=7)
    before = complete(chat_server, prompt)
    (emptied,) = chat_server.post("/deepinfer/cache/flush", {}).json["flushed"]
    assert emptied["pages"] >= 2
    (emptied,) = chat_server.post("/deepinfer/cache/flush", {}).json["flushed"]
    assert emptied["pages"] == 0
    after = complete(chat_server, prompt)
    assert cached(after) == 0
    assert text(after) == text(before)
    assert cached(complete(chat_server, prompt)) == 256


# ---- a model with states ---------------------------------------------------------------------------


def logprobs(answer: dict) -> torch.Tensor:
    return torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])


def test_a_hit_with_a_state_gives_the_golden_tokens(serve):
    """Of 300 tokens, states are kept at floor128(300) and floor128(300 - 24), which are both 256."""
    golden = load_file(V41_TINY / "golden_replay.safetensors")
    prompt = load_file(V41_TINY / "golden.safetensors")["p300.input_ids"].tolist()
    greedy = golden["p300.keep24.greedy"]
    rows = golden["p300.keep24.decode_logits"].log_softmax(-1)
    wanted = rows.gather(1, greedy[:, None])[:, 0]
    with serve(V41_TINY, yoco_keep_tokens=24) as server:
        server.ready()

        shown = [token for token in greedy.tolist() if token > 2]  # not the padding token
        right = server.post("/detokenize", {"tokens": shown}).json["prompt"]
        cold, hit = (complete(server, prompt, max_tokens=len(greedy), logprobs=0) for _ in range(2))
        assert (cached(cold), cached(hit)) == (0, 256)
        for answer in (cold, hit):
            torch.testing.assert_close(logprobs(answer), wanted, atol=1e-3, rtol=0)
            assert text(answer) == right
        # The next turn goes on from the same state; a prompt of keep + 128 has none before its tail.
        longer = prompt + some_ids(100, seed=8)
        turn = complete(server, longer)
        assert cached(turn) == 256
        assert text(turn) == text(complete(server, longer, prefix_cache=False))
        # keep - 1, keep and keep + 1 tokens past a border.
        for extra, hit_tokens in ((23, 0), (24, 128), (25, 128)):
            ids = some_ids(PAGE + extra, seed=extra)
            first, second = complete(server, ids), complete(server, ids)
            assert (cached(first), cached(second)) == (0, hit_tokens), extra
            assert text(first) == text(second) == text(complete(server, ids, prefix_cache=False))


def test_a_cache_without_bounded_replay_is_refused(cli, short_dir):
    options = ("--yoco-keep-tokens", 0, "--hicache-size-gb", 0.1)
    ended = cli("serve", "--model", V41_TINY, "--port", 0, "--run-dir", short_dir / "run", *options)
    assert ended.returncode != 0
    sentence = next(x for x in ended.stderr.splitlines() if x.startswith("deepinfer: "))
    assert "--yoco-keep-tokens" in sentence
    assert "--hicache-size-gb" in sentence
    assert "Traceback" not in ended.stderr
    assert not (short_dir / "run").exists()


# ---- several ranks ---------------------------------------------------------------------------------


def chat(server, content: str, headers=None) -> int:
    """Cached tokens of a conversation's first turn."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return cached(server.post("/v1/chat/completions", body, headers or {}).json)


def test_a_conversation_stays_with_the_rank_that_has_its_pages(serve):
    long_text = "hello the lamp or the rain? " * 12
    with serve(dp=2, kv_cache_gb=0.01, hicache_size_gb=0.01) as server:
        server.ready()
        for number in range(6):
            messages = [{"role": "user", "content": f"{number} {long_text}"}]
            known = 0
            for _ in range(3):
                body = {"messages": messages, "max_tokens": 4, "temperature": 0}
                answer = server.post("/v1/chat/completions", body).json
                assert cached(answer) == known // PAGE * PAGE
                known = answer["usage"]["prompt_tokens"]
                said = answer["choices"][0]["message"]["content"]
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": long_text},
                ]
        for rank in ("0", "1"):
            eventually(
                lambda rank=rank: server.metric("hicache_lookups_total", rank=rank), 60, "it worked"
            )

        # One text under many names: it misses once a rank, whoever asks.
        content = "tea at night? " * 20
        names = [{"X-Session-Affinity": f"session {number}"} for number in range(8)]
        first = [chat(server, content, name) for name in names]
        assert first.count(0) == 2, first
        assert 0 not in [chat(server, content, name) for name in names]
