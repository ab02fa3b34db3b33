"""A thousand random requests, good, bad and abandoned: each is answered in time and rightly, and
afterwards nothing of them is left in any process."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from daemon.cli.check.event_stream import whole_stream
from frontend.tokenizer.detokenizer import Detokenizer
from tests.support.raw_http import RawAnswer, post_request, read_answer
from tests.support.waiting import eventually

BATCH = 40
BATCHES = 25
CONCURRENT = 32
ANSWER_SECONDS = 60.0
VOCAB = 265
POOL_TOKENS = 12 * 128

TokenBytes = Callable[[int], bytes]
"""What a token stands for."""


@dataclass(frozen=True)
class Case:
    """One request. `wrong` names the field that must be refused, `leave_after` the bytes of the answer
    after which the client goes away, `rudely` with a reset."""

    path: str
    body: dict
    wrong: str | None = None
    leave_after: int | None = None
    rudely: bool = False


# ---- what is asked -------------------------------------------------------------------------------

words = st.text(st.sampled_from("abc xyz,.\n<|im_end|>é한🙂"), min_size=1, max_size=60)
lengths = st.one_of(*[st.integers(1, 24)] * 4, st.integers(100, 200))
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(
                words, words.map(lambda text: [{"type": "text", "text": text}, {"type": "text", "text": "!"}])
            ),
        }
    ),
    min_size=1, max_size=4,
)  # fmt: skip
token_ids = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=40)
long_ids = st.builds(lambda ids, times: ids * times, token_ids, st.integers(1, 8))
prompts = st.one_of(
    words, words.map(lambda text: text * 6), long_ids,
    st.lists(words, min_size=1, max_size=3), st.lists(token_ids, min_size=1, max_size=3),
)  # fmt: skip
stops = st.one_of(words, st.lists(words, min_size=1, max_size=4))
biases = st.dictionaries(st.integers(0, VOCAB - 1).map(str), st.floats(-100, 100), max_size=4)

COMMON = {
    "temperature": st.one_of(st.just(0), st.floats(0, 2)),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": stops,
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "logit_bias": biases,
    "n": st.integers(1, 3),
    "ignore_eos": st.booleans(),
    "user": words,
    "metadata": st.dictionaries(words, words, max_size=2),
    "priority": st.integers(-3, 3),
    "cache_salt": words,
    "prefix_cache": st.booleans(),
    "model": st.just("tiny-llama"),
}
WRONG = {
    "temperature": [-0.1, 2.1, "hot", True, [1]],
    "top_p": [0, -1, 1.01, "1"],
    "top_k": [-2, 1.5, "10"],
    "min_p": [-0.01, 1.5, {}],
    "seed": [2**63, 0.5, "x"],
    "stop": [[1], 7, [""], ["a"] * 65, {"a": 1}],
    "stop_token_ids": [[-1], [VOCAB], ["1"], 5, [True]],
    "presence_penalty": [2.5, "1"],
    "frequency_penalty": [-3, []],
    "repetition_penalty": [0, -1, "2"],
    "logit_bias": [{"-1": 1}, {str(VOCAB): 1}, {"x": 1}, {"5": 101}, {"5": "1"}, [5]],
    "n": [0, -1, 17, "2", 1.5],
    "ignore_eos": ["yes", 1],
    "user": [5, {}],
    "metadata": ["text", [1]],
    "priority": ["high", 1.5, 1001],
    "max_tokens": [0, -5, 1.5, "many", True],
    "min_tokens": [-1, 2**71, "1"],
    "stream": ["yes", 1],
    "stream_options": [5, {"include_usage": "yes"}],
    "model": ["gpt-4", 5],
}
WRONG_CHAT = {
    "messages": [
        None, [], "hi", [5], [{"role": "user"}], [{"role": 5, "content": "x"}],
        [{"content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "long " * 2000}],
    ],
    "top_logprobs": [21, -1, "3"],
    "logprobs": [3, "yes"],
    "max_completion_tokens": [0, "many"],
}  # fmt: skip
WRONG_COMPLETION = {
    "prompt": [None, 5, [], [[]], [1, "a"], [VOCAB], [-1], {"a": 1}, [5] * (POOL_TOKENS + 1)],
    "logprobs": [21, -1, "3"],
    "suffix": ["end"],
    "best_of": [3],
}


def draw_body(draw, chat: bool) -> dict:
    chosen = draw(st.sets(st.sampled_from(sorted(COMMON)), max_size=6))
    body = {name: draw(COMMON[name]) for name in sorted(chosen)}
    limit = draw(lengths)
    newer = chat and draw(st.booleans())
    body["max_completion_tokens" if newer else "max_tokens"] = limit
    if draw(st.booleans()):
        body["min_tokens"] = draw(st.integers(0, limit))
    if draw(st.booleans()):
        body["stream"] = True
        if draw(st.booleans()):
            names = ("include_usage", "continuous_usage_stats")
            body["stream_options"] = {name: draw(st.booleans()) for name in names}
    if chat:
        body["messages"] = draw(messages)
        if draw(st.integers(0, 3)) == 0:
            body["logprobs"] = True
            body["top_logprobs"] = draw(st.integers(0, 20))
    else:
        body["prompt"] = draw(prompts)
        if draw(st.integers(0, 3)) == 0:
            body["logprobs"] = draw(st.integers(0, 20))
        elif draw(st.integers(0, 3)) == 0:
            body["echo"] = True
    return body


@st.composite
def cases(draw) -> Case:
    chat = draw(st.booleans())
    body = draw_body(draw, chat)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    kind = draw(st.integers(0, 9))
    if kind > 7:
        table = {**WRONG, **(WRONG_CHAT if chat else WRONG_COMPLETION)}
        field = draw(st.sampled_from(sorted(table)))
        return Case(path, {**body, field: draw(st.sampled_from(table[field]))}, wrong=field)
    if kind > 5:
        return Case(path, body, leave_after=draw(st.integers(0, 3000)), rudely=draw(st.booleans()))
    return Case(path, body)


# ---- how it is asked ------------------------------------------------------------------------------


async def ask(address: tuple[str, int], case: Case) -> RawAnswer | None:
    """The answer; None where the client goes away."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(post_request(case.path, case.body))
        if case.leave_after is not None:
            left = case.leave_after
            while left > 0 and (data := await reader.read(left)):
                left -= len(data)
            if case.rudely:
                linger = struct.pack("ii", 1, 0)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(1, 13, linger)  # SOL_SOCKET, SO_LINGER: close() sends a reset
            return None
        raw = await reader.read()
    finally:
        writer.close()
    return read_answer(raw)


async def ask_all(address, batch: list[Case]) -> list[RawAnswer | None]:
    room = asyncio.Semaphore(CONCURRENT)

    async def one(case: Case) -> RawAnswer | None:
        async with room:
            return await asyncio.wait_for(ask(address, case), ANSWER_SECONDS)

    return await asyncio.gather(*map(one, batch))


# ---- what must come back ---------------------------------------------------------------------------


def check(case: Case, answer: RawAnswer, token_bytes: TokenBytes) -> str:
    """Returns a word for the statistics."""
    if answer.status == 429:
        assert int(answer.headers["retry-after"]) > 0
        assert json.loads(answer.body)["error"]["code"] == "overloaded"
        return "overloaded"
    if case.wrong is not None:
        error = json.loads(answer.body)["error"]
        assert answer.status == (404 if error["code"] == "model_not_found" else 400), answer
        assert error["message"]
        assert error["param"].startswith(case.wrong) or case.wrong in error["message"], error
        return "refused"
    assert answer.status == 200, answer
    if case.body.get("stream"):
        return check_stream(case, answer.body)
    value = json.loads(answer.body)
    reasons = [choice["finish_reason"] for choice in value["choices"]]
    check_choices(case, reasons)
    check_usage(case, value["usage"], reasons)
    check_stop_tokens(case, value["choices"], token_bytes)
    return "whole"


def check_stream(case: Case, body: bytes) -> str:
    events = [json.loads(data) for data in whole_stream(body)]
    failed = [event["error"] for event in events if "error" in event]
    if failed:
        # One of several prompts found no room after another one's stream had begun.
        assert isinstance(case.body.get("prompt"), list), failed
        assert failed[0]["code"] == "overloaded", failed
        return "overloaded midway"
    reasons: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert all(len(found) == 1 for found in reasons.values()), reasons
    ends = [found[0] for _, found in sorted(reasons.items())]
    check_choices(case, ends)
    options = case.body.get("stream_options", {})
    if options.get("include_usage"):
        assert events[-1]["choices"] == []
        check_usage(case, events[-1]["usage"], ends)
    return "streamed"


def wanted_choices(body: dict) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return body.get("n", 1) * (len(prompt) if several else 1)


def check_choices(case: Case, reasons: list[str]) -> None:
    assert len(reasons) == wanted_choices(case.body)
    assert set(reasons) <= {"stop", "length"}
    may_stop = any(case.body.get(name) for name in ("stop", "stop_token_ids"))
    if case.body.get("ignore_eos") and not may_stop:
        assert set(reasons) == {"length"}


def check_usage(case: Case, usage: dict, reasons: list[str]) -> None:
    limit = case.body.get("max_completion_tokens") or case.body["max_tokens"]
    # Who stops has `min_tokens` at least, and one: the end itself.
    least = max(1, case.body.get("min_tokens", 0))
    assert (
        sum(limit if reason == "length" else least for reason in reasons)
        <= (usage["completion_tokens"])
    )
    assert usage["completion_tokens"] <= len(reasons) * limit
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check_stop_tokens(case: Case, choices: list[dict], token_bytes: TokenBytes) -> None:
    """After `min_tokens` tokens no stop token is among those of a chat with logprobs: it would have ended
    the choice, and the one that did is not shown."""
    if case.body.get("logprobs") is not True:
        return
    stops = [token_bytes(index) for index in case.body.get("stop_token_ids", ())]
    for choice in choices:
        shown = choice["logprobs"]["content"][case.body.get("min_tokens", 0) :]
        assert not [entry for entry in shown if bytes(entry["bytes"]) in stops]


def is_empty(server) -> bool:
    """Whether no process holds anything of a request."""
    state = server.state()
    cache = state["cache"][0]
    held = [
        *state["status"]["requests"].values(), len(state["requests"]), cache["pages_used"],
        cache["slots_used"], cache["sequences_running"], cache["sequences_waiting"],
        *(queue["depth"] for queue in state["queues"]),
    ]  # fmt: skip
    return not any(held) and server.metric("http_requests_active") <= 1  # the question itself


# ---- the test ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_server(serve):
    """A pool of twelve pages for eight sequences, and little room to wait."""
    pool = 12.5 * 65_536 / 1e9
    with serve(
        kv_cache_gb=pool, max_num_seqs=8, max_batched_tokens=96, max_waiting=16, allow_priority=True
    ) as server:  # fmt: skip
        yield server.ready()


@pytest.mark.slow
def test_a_thousand_random_requests_leave_nothing(small_server, tiny_dir):
    server = small_server
    texts = Detokenizer(Tokenizer.from_file(str(tiny_dir / "tokenizer.json")))
    assert server.get("/v1/models").json["data"][0]["max_model_len"] == POOL_TOKENS
    pids = server.pids()
    seen: Counter[str] = Counter()

    @settings(
        derandomize=True, database=None, deadline=None, max_examples=BATCHES,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(cases(), min_size=BATCH, max_size=BATCH))
    def run(batch):
        answers = asyncio.run(ask_all(server.address, batch))
        for case, answer in zip(batch, answers, strict=True):
            seen["left" if answer is None else check(case, answer, texts.token_bytes)] += 1
        eventually(lambda: is_empty(server), 60, "all pages, slots, queues and tables are empty")

    run()
    print(seen)
    assert seen.total() >= BATCH * BATCHES
    for kind in ("whole", "streamed", "refused", "overloaded", "left"):
        assert seen[kind] > 20, seen
    eventually(lambda: server.metric("num_preemptions_total") > 0, 60, "the pool was short")
    assert server.pids() == pids
    assert all(row["restarts"] == 0 for row in server.ask("processes"))
    assert "Traceback" not in server.log
