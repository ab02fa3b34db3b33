"""What clients rely on beyond the answers themselves, through all processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.instance import JSON_TYPE
from tests.support.waiting import eventually

SECONDS = 60.0
"""Deadline of every wait: what is waited for comes at once, but for a busy machine."""
LONG = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
FAKE = {"engine": "fake", "fake_step_ms": 20}


def stages(server) -> dict[str, int]:
    return server.ask("status")["requests"]


def test_past_max_waiting_a_request_is_told_to_come_back(fake_server):
    server = fake_server  # two run, two wait
    aborted = server.metric("num_aborted_requests_total")
    rejected = server.metric("admission_rejections_total", reason="overloaded")
    with ThreadPoolExecutor(2) as pool:
        with (
            server.stream("/v1/completions", LONG) as first,
            server.stream("/v1/completions", LONG) as second,
        ):
            eventually(lambda: stages(server)["running"] == 2, SECONDS, "two run")
            waiting = [
                pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 1})
                for _ in range(2)
            ]
            eventually(lambda: stages(server)["queued"] == 2, SECONDS, "two wait")
            reply = server.post("/v1/completions", LONG)
            assert reply.status == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json["error"]["code"] == "overloaded"
            first.hang_up()
            second.hang_up()
        assert [future.result(SECONDS).status for future in waiting] == [200, 200]
    eventually(
        lambda: server.metric("admission_rejections_total", reason="overloaded") == rejected + 1,
        SECONDS,
        "counted",
    )
    eventually(lambda: not any(stages(server).values()), SECONDS, "nothing is left")
    wait_for_aborted(server, aborted + 2)


def stages_of_all(server) -> list[str]:
    return [request["stage"] for request in server.ask("requests")]


# On the engine that takes half a minute for an answer: it has not ended by itself meanwhile, and only what
# did not counts as aborted.


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_frees_its_pages(fake_server, within, path):
    server = fake_server
    # An event per token, also where the fake engine's tokens have no text.
    logprobs = True if "chat" in path else 1
    messages = [{"role": "user", "content": "hello " * 50}]
    body = {**LONG, "messages": messages, "logprobs": logprobs}
    aborted = server.metric("num_aborted_requests_total")
    with server.stream(path, body) as stream:
        next(stream.events())
        eventually(lambda: server.ask("cache")[0]["pages_used"], SECONDS, "it has pages")
        # Worker and router tell what they know each in their own time.
        eventually(lambda: stages_of_all(server) == ["running"], SECONDS, "the router knows of it")
        stream.hang_up()
        wait_for_nothing(server, within)
    wait_for_aborted(server, aborted + 1)


def test_leaving_before_a_whole_answer_frees_its_pages(fake_server, within):
    server = fake_server
    aborted = server.metric("num_aborted_requests_total")
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(LONG), JSON_TYPE)
    eventually(lambda: server.ask("cache")[0]["pages_used"], SECONDS, "it has pages")
    connection.close()
    wait_for_nothing(server, within)
    wait_for_aborted(server, aborted + 1)


def wait_for_nothing(server, within) -> None:
    eventually(lambda: not server.ask("cache")[0]["pages_used"], within(1.0), "the pages are free")
    eventually(lambda: server.ask("requests") == [], within(1.0), "the router has forgotten it")


def wait_for_aborted(server, count: int) -> None:
    found = "num_aborted_requests_total"
    eventually(lambda: server.metric(found) == count, SECONDS, "it was counted")


def test_too_long_a_prompt_is_told_the_lengths(tiny_server):
    limit = tiny_server.get("/v1/models").json["data"][0]["max_model_len"]
    assert limit == 2048
    for body in ({"prompt": [7] * (limit + 5)}, {"prompt": "x " * limit}):
        reply = tiny_server.post("/v1/completions", body)
        error = reply.json["error"]
        assert reply.status == 400
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
        assert str(limit) in error["message"]
        assert error["param"] == "prompt"
    assert f"{limit + 5} tokens" in tiny_server.post(
        "/v1/completions", {"prompt": [7] * (limit + 5)}
    ).json["error"]["message"]  # fmt: skip


def test_a_prompt_as_long_as_the_context_leaves_room_for_one_token(tiny_server):
    reply = tiny_server.post("/v1/completions", {"prompt": [7] * 2047, "max_tokens": 50})
    assert reply.status == 200
    assert reply.json["usage"]["completion_tokens"] == 1
    assert reply.json["choices"][0]["finish_reason"] in ("length", "stop")


def test_keys_of_a_file_open_the_api(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# clients\nsecret-one\n\nsecret-two\n")
    with serve(**FAKE, api_keys_file=keys) as server:
        server.ready()
        body = {"prompt": "hello", "max_tokens": 2}
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer # clients"}, 401),
            ({"Authorization": "Bearer secret-one"}, 200),
            ({"x-api-key": "secret-two"}, 200),
        ):
            reply = server.post("/v1/completions", body, headers)
            assert reply.status == status, headers
        assert server.get("/health").status == 200
        assert "secret-one" not in server.log


def test_a_frontend_that_starts_while_the_keys_file_is_away_serves_until_a_reload(
    serve, cli, tmp_path
):
    keys, away = tmp_path / "keys", tmp_path / "away"
    keys.write_text("old\n")
    with serve(**FAKE, api_keys_file=keys) as server:
        server.ready()
        where = ("--instance", server.instance, "--run-dir", server.run_dir)

        def status(key: str) -> int:
            return server.get("/v1/models", {"x-api-key": key}).status

        keys.rename(away)
        killed = server.pids()["frontend/0"]
        os.kill(killed, signal.SIGKILL)
        eventually(
            lambda: server.pids().get("frontend/0") not in (killed, None), SECONDS, "a new frontend"
        )
        server.ready()
        assert (status("old"), status("new")) == (200, 401)

        failed = cli("keys", "reload", *where)
        assert failed.returncode == 1
        assert "cannot be read" in failed.stderr and "stay as they are" in failed.stderr
        assert status("old") == 200

        keys.write_text("new\n")
        reloaded = cli("keys", "reload", *where)
        assert (reloaded.returncode, "1 for users" in reloaded.stdout) == (0, True), reloaded.stderr
        assert (status("old"), status("new")) == (401, 200)


def test_metrics_can_be_scraped_and_have_the_names_of_dashboards(tiny_server):
    tiny_server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4, "ignore_eos": True})
    names = [
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "num_preemptions",
        "e2e_request_latency_seconds", "prompt_tokens", "generation_tokens",
    ]  # fmt: skip

    def scrape() -> dict:
        reply = tiny_server.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        found = {f.name: f for f in text_string_to_metric_families(reply.body.decode())}
        return found if all(f"deepinfer:{name}" in found for name in names) else {}

    # Each process tells what it has counted in its own time.
    families = eventually(scrape, SECONDS, f"all of {names} are there")
    assert families["deepinfer:kv_cache_usage_perc"].samples[0].labels == {"rank": "0"}
    assert tiny_server.get("/deepinfer/metrics").status == 200


def test_metrics_count_what_was_answered(serve):
    with serve(**FAKE) as server:
        server.ready()
        for _ in range(3):
            body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
            assert server.post("/v1/completions", body).status == 200
        wanted = {
            "generation_tokens_total": 12, "prompt_tokens_total": 3, "request_success_total": 3,
            "time_to_first_token_seconds_count": 3, "queue_time_seconds_count": 3,
        }  # fmt: skip
        # Each process tells what it has counted in its own time.
        eventually(
            lambda: {name: server.metric(name) for name in wanted} == wanted, SECONDS, "counted"
        )
        assert server.metric("request_success_total", finished_reason="length") == 3


def test_not_ready_while_loading_and_ready_after(serve):
    with serve(hang_seconds=120) as server:
        worker = server.listening().pids()["worker/0"]
        os.kill(worker, signal.SIGSTOP)  # it takes its time
        reply = server.get("/ready")  # answered as soon as the frontend runs: connections wait
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json["ready"] is False
        assert reply.json["reason"]
        assert server.get("/health").status == 200
        refused = server.post("/v1/completions", {"prompt": "hello"})
        assert refused.status == 503
        assert "retry-after" in refused.headers
        os.kill(worker, signal.SIGCONT)
        server.ready()
        wanted = {"ready": True, "state": "ready", "reason": ""}
        eventually(lambda: server.get("/ready").json == wanted, SECONDS, "it says so")


def test_a_stop_ends_answers_that_take_too_long(serve):
    with serve(**FAKE, drain_timeout=0.5) as server:
        server.ready()
        with server.stream("/v1/completions", {**LONG, "max_tokens": 8000}) as stream:
            events = stream.events()
            next(events)
            server.signal(signal.SIGTERM)
            last = list(events)[-1]
            assert "shutting down" in last["error"]["message"]
        assert server.wait() == 0


def test_the_fake_engine_has_logprobs_too(fake_server):
    pids = fake_server.pids()
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "logprobs": 2}
    reply = fake_server.post("/v1/completions", body)
    assert reply.status == 200
    found = reply.json["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [0.0] * 3
    assert fake_server.pids() == pids
