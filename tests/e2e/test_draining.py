"""How an instance ends while it works."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess

from tests.support.waiting import eventually

SECONDS = 120.0


def completion(max_tokens: int = 8) -> dict:
    return {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}


def test_the_curl_line_that_serve_prints_works(fake_server):
    line = eventually(
        lambda: re.search(r"^curl .*$", fake_server.output, re.MULTILINE), SECONDS, "a curl line"
    )
    words = shlex.split(line.group())
    assert words[1] == fake_server.url + "/v1/chat/completions"
    done = subprocess.run(
        ["curl", "--silent", "--fail", *words[1:]], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b'"assistant"' in done.stdout


def test_running_requests_end_and_new_ones_are_refused(serve):
    body = {**completion(100), "stream_options": {"include_usage": True}}
    options = dict(engine="fake", fake_step_ms=20, drain_timeout=120, hang_seconds=120)
    with serve(**options) as server:
        server.ready()
        worker = server.pids()["worker/0"]
        with server.stream("/v1/completions", body) as stream:
            events = stream.events()
            next(events)
            os.kill(worker, signal.SIGSTOP)  # so that the answer cannot end before we have looked
            server.signal(signal.SIGTERM)
            eventually(lambda: server.get("/ready").status == 503, SECONDS, "not ready")
            refused = server.post("/v1/completions", completion())
            assert refused.status == 503
            assert int(refused.headers["Retry-After"]) >= 1
            os.kill(worker, signal.SIGCONT)
            *_, last, usage = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 100
        assert server.wait() == 0


def test_a_second_signal_does_not_wait_for_running_requests(serve):
    with serve(engine="fake", fake_step_ms=50, drain_timeout=600) as server:
        server.ready()
        with server.stream("/v1/completions", completion(4000)) as stream:
            next(stream.events())
            server.signal(signal.SIGINT)
            eventually(lambda: "stopping" in server.log, SECONDS, "it stops")
            server.signal(signal.SIGINT)
            assert server.wait() == 0


def test_the_drain_limit_ends_what_does_not_end(serve):
    with serve(engine="fake", fake_step_ms=50, drain_timeout=0.5) as server:
        server.ready()
        with server.stream("/v1/completions", completion(4000)) as stream:
            next(stream.events())
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
