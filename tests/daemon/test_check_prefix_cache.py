"""`check prefix-cache` against servers that answer well, wrongly, and not at all."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from daemon.cli.check.api_client import CHAT, ApiClient, RequestFailed
from daemon.cli.check.prefix_cache import difference, prefix_cache
from daemon.errors import DeepInferError

PAGE = 128
KEY = "secret"


class FakeServer:
    """Counts a word as a token and remembers prompts page by page, as the real one does. `change`
    alters the events of an answer before they are sent; `cached` is what it would report."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.connections: set[int] = set()
        self.has_cache = True
        self.can_chat = True
        self.obeys = True
        self.change: Callable[[dict, list[dict]], list[dict]] = lambda body, events: events
        self.key: str | None = None
        self._known: set[tuple[str, str]] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.connections.add(id(self.connection))
                self._whole(200, {"object": "list", "data": [{"id": "some-model"}]})

            def do_POST(self) -> None:
                fake.connections.add(id(self.connection))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    self._whole(401, {"error": {"message": "No key.", "code": None}})
                    return
                if "messages" in body and not fake.can_chat:
                    error = {"message": "Cannot chat.", "code": "no_chat_template"}
                    self._whole(400, {"error": error})
                    return
                fake.bodies.append(body)
                self._stream(fake.change(body, fake.answer(body)))

            def _whole(self, status: int, value: object) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, events: list[dict]) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for value in events:
                    self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")
                if events and "usage" in events[-1]:
                    self._chunk(b"data: [DONE]\n\n")
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    self.close_connection = True

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, body: dict) -> list[dict]:
        said_so_far = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
        words = said_so_far.split()
        pages = [" ".join(words[:end]) for end in range(PAGE, len(words) + 1, PAGE)]
        cached = 0
        if self.has_cache and (body.get("prefix_cache", True) or not self.obeys):
            known = [(body.get("cache_salt", ""), page) for page in pages]
            cached = PAGE * sum(entry in self._known for entry in known[: (len(words) - 1) // PAGE])
            self._known.update(known)
        said = [f"w{len(words)}", " and", " so on"][: body["max_tokens"]]
        return [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
            *({"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in said),
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
            {"choices": [], "usage": {
                "prompt_tokens": len(words), "completion_tokens": len(said),
                "prompt_tokens_details": {"cached_tokens": cached}}},
        ]  # fmt: skip


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def check(fake: FakeServer, **options) -> int:
    """The command's exit code where it reaches a verdict."""
    with pytest.raises(SystemExit) as end:
        prefix_cache(
            url=fake.url, **{"prompt_tokens": 400, "conversations": 2, "turns": 3, **options}
        )
    return end.value.code


def conversation_turns(fake: FakeServer) -> list[dict]:
    """The compared requests; before them come a question for chat, a sample and two probes."""
    return fake.bodies[4:]


def test_equal_answers_end_with_0_and_show_each_turn(fake, capsys):
    assert check(fake) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d", line)]
    assert [row[:2] for row in rows] == [[str(c), str(t)] for t in (1, 2, 3) for c in (1, 2)]
    assert [int(row[3]) for row in rows] == [0, 0, 384, 384, 512, 512]
    assert "6 of 6 answers equal." in out


def test_each_turn_is_asked_twice_in_changing_order_and_grows_by_the_answer(fake):
    assert check(fake, conversations=1, turns=4) == 0
    turns = conversation_turns(fake)
    assert [body["prefix_cache"] for body in turns] == [False, True, True, False] * 2
    for one, other in zip(turns[::2], turns[1::2], strict=True):
        assert one["messages"] == other["messages"]
        assert one["cache_salt"] == other["cache_salt"]
    for number, body in enumerate(turns[::2]):
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["user", "assistant"] * number + ["user"]
        assert body["temperature"] == 0
    before, after = turns[0]["messages"], turns[2]["messages"]
    assert after[0] == before[0]
    assert after[1]["content"] == f"w{len(before[0]['content'].split())} and so on"


def test_a_second_run_begins_cold_and_says_the_same(fake):
    assert check(fake) == check(fake) == 0
    first, second = fake.bodies[:16], fake.bodies[16:]
    assert [body["messages"] for body in first] == [body["messages"] for body in second]
    assert not {b["cache_salt"] for b in first[4:]} & {b["cache_salt"] for b in second[4:]}


def test_a_model_that_cannot_chat_gets_plain_prompts_that_grow(fake, capsys):
    fake.can_chat = False
    assert check(fake, conversations=1) == 0
    assert "3 of 3 answers equal." in capsys.readouterr().out
    prompts = [body["prompt"] for body in fake.bodies[3::2]]
    assert len(prompts) == 3
    for before, after in pairwise(prompts):
        assert after.startswith(f"{before}\nw{len(before.split())} and so on\n")


def test_all_goes_through_one_connection(fake):
    assert check(fake) == 0
    assert len(fake.connections) == 1


def spoil(field: str) -> Callable[[dict, list[dict]], list[dict]]:
    """Answers of the second turn that came from the cache are wrong."""

    def change(body: dict, events: list[dict]) -> list[dict]:
        if body.get("prefix_cache") and len(body["messages"]) == 3:
            if field == "text":
                events[2]["choices"][0]["delta"]["content"] = " or"
            elif field == "finish":
                events[-2]["choices"][0]["finish_reason"] = "stop"
            else:
                events[-1]["usage"]["completion_tokens"] += 1
        return events

    return change


@pytest.mark.parametrize("field", ["text", "finish", "count"])
def test_a_different_answer_ends_with_1_and_is_shown(fake, capsys, field):
    fake.change = spoil(field)
    assert check(fake, conversations=1) == 1
    out = capsys.readouterr().out
    assert "2 of 3 answers equal." in out
    assert "conversation 1, turn 2:" in out
    assert [line.split()[-1] for line in out.splitlines() if line.endswith("DIFFERENT")]
    if field == "text":
        assert "without the cache 'and so on', with it 'or so on'" in out


def test_json_says_all_of_it(fake, capsys):
    fake.change = spoil("text")
    assert check(fake, conversations=1, json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "some-model"
    assert report["equal"] is False
    assert [turn["equal"] for turn in report["turns"]] == [True, False, True]
    assert [turn["cached_tokens"] for turn in report["turns"]] == [0, 384, 512]
    assert all(turn["ttft_off_seconds"] > 0 < turn["ttft_on_seconds"] for turn in report["turns"])
    total = sum(turn["prompt_tokens"] for turn in report["turns"])
    assert report["hit_share"] == pytest.approx(896 / total)


def not_checked(fake_url: str, **options) -> str:
    """The sentence of a check that came to nothing; its exit code is 2."""
    with pytest.raises(DeepInferError) as error:
        prefix_cache(url=fake_url, **{"prompt_tokens": 400, **options})
    assert error.value.exit_code == 2
    return str(error.value)


def test_a_server_without_a_cache(fake):
    fake.has_cache = False
    sentence = not_checked(fake.url)
    assert "has no prefix cache" in sentence
    assert "--hicache-size-gb" in sentence


def test_a_server_that_uses_the_cache_when_told_not_to(fake):
    fake.obeys = False
    assert '"prefix_cache": false' in not_checked(fake.url, turns=5)


def test_prompts_that_are_too_short_for_any_hit(fake):
    assert "No turn took anything" in not_checked(fake.url, prompt_tokens=20, turns=1)


def test_nobody_listens(fake):
    fake.close()
    assert "does not answer" in not_checked(fake.url)
    fake.close = lambda: None


def test_a_key_is_wanted(fake):
    fake.key = KEY
    assert "answered 401: No key." in not_checked(fake.url)
    assert check(fake, api_key=KEY) == 0


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "broke a stream off"),
        ([{"choices": []}, {"error": {"message": "All is lost."}}], "All is lost."),
        ([{"choices": "none"}], "does not speak OpenAI's API"),
    ],
    ids=["broken off", "error event", "not understood"],
)
def test_a_stream_that_ends_badly(fake, events, words):
    fake.change = lambda body, good: good if len(fake.bodies) < 5 else events
    assert words in not_checked(fake.url)


@pytest.mark.parametrize("url", ["ftp://here", "http://", "http://here:port"])
def test_a_url_that_is_none(url):
    with pytest.raises(DeepInferError, match="no URL of a server"):
        ApiClient(url)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_url_as_other_clients_want_it_does_too(fake, ending):
    with ApiClient(fake.url + ending) as client:
        assert b"some-model" in client.get("/v1/models")


def test_a_stream_that_is_left_early_does_not_spoil_the_next(fake):
    body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 3}
    with ApiClient(fake.url) as client:
        part = client.stream(CHAT, body, leave_after=2)
        assert (part.text, part.finish_reason) == ("w2", None)
        assert client.stream(CHAT, body).result() == ("w2 and so on", "length", 3)


def test_an_error_has_a_kind_for_counting(fake):
    fake.key = KEY
    with ApiClient(fake.url) as client, pytest.raises(RequestFailed) as refused:
        client.stream(CHAT, {})
    assert refused.value.kind == "401"


def test_where_texts_part():
    from daemon.cli.check.api_client import StreamedAnswer as Answer

    assert difference(Answer("abc"), Answer("abc")) == ""
    assert "from character 3 on, without the cache '', with it 'd'" in difference(
        Answer("abc"), Answer("abcd")
    )
