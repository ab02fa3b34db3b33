"""The edge-triggered reader loses no message, whatever is sent meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from transport.fd_reader import BATCH, AsyncDealer
from transport.ids import ProcessName, RequestId
from transport.messages.base import Hello
from transport.messages.generate import Cancel

HELLO = Hello(1, "frontend", ProcessName("frontend/0"), 1, "hash")
FRONTEND = ProcessName("frontend/0")
SECONDS = 10.0


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """run(coroutine) on a loop, within SECONDS."""

    def start(coroutine):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(coroutine, SECONDS))

    return start


def cancel(number: int) -> Cancel:
    return Cancel(RequestId(str(number)))


class Inbox:
    """Collects messages; `full` is set at the `wanted`-th."""

    def __init__(self, wanted: int) -> None:
        self.ids: list[str] = []
        self.full = asyncio.Event()
        self._wanted = wanted

    def take(self, received) -> None:
        self.ids.append(received.message.request_id)
        if len(self.ids) == self._wanted:
            self.full.set()


def test_a_burst_larger_than_a_batch_arrives_whole_and_in_order(run, router, connect, receive):
    dealer = connect("frontend/0")
    count = 3 * BATCH + 17

    async def read():
        inbox = Inbox(count)
        reader = AsyncDealer(dealer, inbox.take)
        reader.send(HELLO)
        receive(router)
        for number in range(count):
            assert router.send(FRONTEND, cancel(number))
        await inbox.full.wait()
        await reader.close()
        return inbox.ids

    assert run(read()) == [str(number) for number in range(count)]


def test_what_came_before_the_reader_is_read(run, router, connect, receive):
    dealer = connect("frontend/0")
    dealer.send(HELLO)
    receive(router)
    for number in range(BATCH):
        router.send(FRONTEND, cancel(number))
    assert dealer.socket.poll(1000)

    async def read():
        inbox = Inbox(BATCH)
        reader = AsyncDealer(dealer, inbox.take)
        await inbox.full.wait()
        await reader.close()

    run(read())


def test_sends_between_receives_lose_nothing(run, router, connect, receive):
    """Each send may swallow the edge of a message that arrives at the same moment."""
    dealer = connect("frontend/0")
    rounds = 400

    async def read():
        inbox = Inbox(2 * rounds)
        reader = AsyncDealer(dealer, inbox.take)
        reader.send(HELLO)
        receive(router)
        for number in range(rounds):
            router.send(FRONTEND, cancel(2 * number))
            assert reader.send(cancel(number))
            router.send(FRONTEND, cancel(2 * number + 1))
            if number % 7 == 0:
                await asyncio.sleep(0)
        await inbox.full.wait()
        await reader.close()
        return inbox.ids

    assert run(read()) == [str(number) for number in range(2 * rounds)]
    assert len(receive(router, rounds)) == rounds


def test_handlers_that_answer_keep_the_conversation_going(run, router, connect, receive):
    dealer = connect("frontend/0")
    rounds = 300

    async def talk():
        inbox = Inbox(rounds)
        readers: list[AsyncDealer] = []

        def answer(received) -> None:
            inbox.take(received)
            readers[0].send(received.message)

        readers.append(AsyncDealer(dealer, answer))
        readers[0].send(HELLO)
        await asyncio.to_thread(receive, router)

        def ping() -> None:
            for number in range(rounds):
                router.send(FRONTEND, cancel(number))
                assert receive(router)[0].message == cancel(number)

        await asyncio.to_thread(ping)
        await readers[0].close()

    run(talk())


def test_an_undecodable_message_is_skipped(run, router, connect, receive):
    dealer = connect("frontend/0")

    async def read():
        inbox = Inbox(2)
        reader = AsyncDealer(dealer, inbox.take)
        reader.send(HELLO)
        receive(router)
        router.send(FRONTEND, cancel(0))
        router.socket.send_multipart([b"frontend/0", b"\xc1garbage"])
        router.send(FRONTEND, cancel(1))
        await inbox.full.wait()
        await reader.close()
        return inbox.ids

    assert run(read()) == ["0", "1"]


def test_closing_twice_is_harmless(run, connect):
    dealer = connect("frontend/0")

    async def close():
        reader = AsyncDealer(dealer, lambda received: None)
        await reader.close()
        await reader.close()

    run(close())
    assert dealer.socket.closed
