"""Questions to the daemon: however many ask, and whatever else is under way."""

from __future__ import annotations

import asyncio

import pytest

from frontend.errors import ApiError
from frontend.links import daemon_client
from frontend.links.daemon_client import MAX_OPEN_COMMANDS, DaemonClient
from transport.messages.control import CacheCommand
from transport.messages.from_daemon import Answer
from transport.messages.to_daemon import Query

METRICS, STATE, FLUSH = Query("metrics"), Query("state"), CacheCommand("flush", 0)


class Daemon:
    """Notes what it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Query | CacheCommand] = []
        self.client = DaemonClient(self.asked.append, lambda _notice: None)

    async def answer(
        self, at: int, tasks: list[asyncio.Task[bytes]], error: str = ""
    ) -> set[bytes | str]:
        """What `tasks` then have: answers, or errors' texts."""
        message = Answer(self.asked[at].serial, error)
        self.client._answered(message, f"answer {at}".encode())
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        return {str(r) if isinstance(r, BaseException) else r for r in results}

    async def ask(
        self, question: Query | CacheCommand, times: int = 1
    ) -> list[asyncio.Task[bytes]]:
        tasks = [asyncio.create_task(self.client.ask(question)) for _ in range(times)]
        await asyncio.sleep(0)
        return tasks


def test_any_number_of_askers_and_of_commands_leave_metrics_to_everybody():
    async def run() -> None:
        daemon = Daemon()
        flushes = await daemon.ask(FLUSH, MAX_OPEN_COMMANDS)
        states = await daemon.ask(STATE, 1000)
        metrics = await daemon.ask(METRICS, 1000)
        assert len(daemon.asked) == MAX_OPEN_COMMANDS + 2
        with pytest.raises(ApiError, match="16 caches are being emptied") as caught:
            await daemon.client.ask(FLUSH)
        assert (caught.value.status, caught.value.retry_after) == (503, 1)
        assert await daemon.answer(-1, metrics) == {b"answer -1"}
        assert await daemon.answer(-2, states) == {b"answer -2"}
        assert not any(task.done() for task in flushes)
        for number, task in enumerate(flushes):
            assert await daemon.answer(number, [task]) == {f"answer {number}".encode()}
        assert await daemon.answer(-1, await daemon.ask(FLUSH)) == {b"answer -1"}

    asyncio.run(run())


def test_one_who_leaves_takes_the_answer_from_nobody():
    async def run() -> None:
        daemon = Daemon()
        first, second = await daemon.ask(METRICS, 2)
        first.cancel()
        await asyncio.wait([first])
        assert await daemon.answer(0, [second]) == {b"answer 0"}

    asyncio.run(run())


def test_a_question_that_is_lost_is_asked_again(monkeypatch):
    monkeypatch.setattr(daemon_client, "SHARED_SECONDS", 0.0)

    async def run() -> None:
        daemon = Daemon()
        lost = await daemon.ask(METRICS)
        other = await daemon.ask(METRICS)
        assert len(daemon.asked) == 2
        assert await daemon.answer(1, other) == {b"answer 1"}
        lost[0].cancel()

    asyncio.run(run())


def test_a_refusal_is_each_askers():
    async def run() -> None:
        daemon = Daemon()
        tasks = await daemon.ask(METRICS, 2)
        assert await daemon.answer(0, tasks, "it ends") == {"The daemon answered: it ends."}

    asyncio.run(run())
