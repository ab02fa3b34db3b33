"""How requests end that neither finish nor are left by their client, and what is noted of them."""

from __future__ import annotations

import asyncio
import re

from frontend.api.answers import CollectedAnswer
from frontend.api.openai_completions import read_completion
from frontend.errors import ApiError
from frontend.generation.generation import Generation
from frontend.generation.job import Job
from frontend.generation.request import ModelLimits
from frontend.metrics import FrontendMetrics
from tests.support.frontend import ByteTexts, Script, request_http
from tests.support.waiting import eventually
from transport.messages.generate import Cancel, RequestFailed
from transport.messages.to_router import Submit
from transport.telemetry.metrics import MetricSet

COMPLETIONS = "/v1/completions"


def test_what_the_server_gives_up_is_not_blamed_on_the_client(serve):
    def script(submit: Submit, payload: bytes):
        if payload == b"bad":
            return Script(error=RequestFailed(submit.request_id, 500, "broken", "Broken."))
        return Script(hang_after=1)

    server = serve(script)
    body = {"prompt": ["good", "bad"]}
    assert request_http(server, "POST", COMPLETIONS, body).status == 500
    eventually(lambda: not server.services.jobs)
    good = next(s.request_id for s in server.router.of_kind(Submit) if s.request_id.endswith("-0"))
    assert [(c.request_id, c.cause) for c in server.router.of_kind(Cancel)] == [(good, "failed")]


class Router:
    """Keeps what a job asks for."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.cancelled: list[str] = []

    def submit(self, generation: Generation, _message: Submit) -> None:
        self.generations.append(generation)

    def cancel(self, request_id: str, _index: int, cause: str) -> None:
        self.cancelled.append(f"{request_id} {cause}")

    def throttle(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...


def test_a_failed_prompt_ends_the_others_though_its_client_has_not_yet_read_of_it():
    async def run() -> Router:
        request = read_completion(b'{"prompt": ["a", "b", "c"]}', ModelLimits("m", 300, 64, 8))
        router = Router()
        job = Job(request, router, ByteTexts(), FrontendMetrics(MetricSet()), "call", 0.0)
        job.start(CollectedAnswer(3))
        router.generations[1].fail(ApiError(400, "Bad."))
        return router

    assert asyncio.run(run()).cancelled == ["call-0 failed", "call-2 failed"]


def test_a_fault_of_the_frontend_ends_the_work_as_failed(serve, monkeypatch):
    async def fault(_self: CollectedAnswer) -> list:
        raise RuntimeError("a fault")

    monkeypatch.setattr(CollectedAnswer, "result", fault)
    server = serve(Script(hang_after=1))
    assert request_http(server, "POST", COMPLETIONS, {"prompt": "Hi"}).status == 500
    eventually(lambda: not server.services.jobs)
    assert [c.cause for c in server.router.of_kind(Cancel)] == ["failed"]


def test_the_log_counts_the_finish_reasons_of_many_choices(serve, caplog):
    def script(submit: Submit, payload: bytes):
        return Script(text="abc", eos=payload != b"long")

    server = serve(script, max_choices=12)
    with caplog.at_level("INFO", "frontend.access"):
        body = {"prompt": ["short", "long", "short"], "n": 4}
        assert request_http(server, "POST", COMPLETIONS, body).status == 200
        assert request_http(server, "POST", COMPLETIONS, {"prompt": "short"}).status == 200
        eventually(lambda: len(caplog.messages) == 2)
    reasons = [re.search(r"finish=(\S+)", line)[1] for line in caplog.messages]
    assert reasons == ["length:4,stop:8", "stop"]


def test_the_prompts_of_one_request_name_what_they_belong_to(serve):
    server = serve()
    for prompt in (["a", "b"], "c", ["d"]):
        assert request_http(server, "POST", COMPLETIONS, {"prompt": prompt}).status == 200
    first, second, *alone = server.router.of_kind(Submit)
    assert first.call and first.call == second.call
    assert first.request_id != second.request_id
    assert [submit.call for submit in alone] == ["", ""]
