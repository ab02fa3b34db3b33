"""A line to the router: greeted, refused, unanswered, and joined anew after a loss."""

from __future__ import annotations

import asyncio
import threading

import pytest
import zmq

from transport.ids import ProcessName, RequestId
from transport.links.errors import LinkError, RouterRefusedError
from transport.links.router import RouterLink
from transport.links.router_async import AsyncRouterLink
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import Hello, Refused, Welcome
from transport.messages.generate import Cancel
from transport.sockets import DealerSocket, RouterSocket

NAME = ProcessName("worker/0")
HELLO = Hello(1, "worker", NAME, 1, "hash")
CANCEL = Cancel(RequestId("a"))
SECONDS = 10.0


class Peer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def on_welcome(self) -> None:
        self.told.append("welcome")

    def on_message(self, message, frames) -> None:
        self.told.append((message, [bytes(frame) for frame in frames]))

    def on_router_lost(self) -> None:
        self.told.append("lost")


class Line:
    """A `RouterLink` whose main loop is the test."""

    def __init__(self, dealer) -> None:
        self.peer = Peer()
        self.router_lost = threading.Event()
        self.link = RouterLink(dealer, HELLO, self.peer, self.router_lost)
        self._poller = zmq.Poller()
        self.link.connect(self._poller)

    def turn(self) -> list[object]:
        """What was told in a turn; waits for something to come unless the router was lost."""
        if not self.router_lost.is_set():
            assert self._poller.poll(SECONDS * 1000), "nothing came"
        self.peer.told.clear()
        self.link.turn()
        return list(self.peer.told)


def test_messages_come_with_their_frames_and_a_new_router_is_greeted(router, connect, receive):
    line = Line(connect(NAME))
    assert receive(router)[0].message == HELLO
    router.send(NAME, Welcome())
    assert line.turn() == ["welcome"]
    router.send(NAME, CANCEL, b"frame")
    assert line.turn() == [(CANCEL, [b"frame"])]
    line.router_lost.set()
    assert line.turn() == ["lost"]
    assert receive(router)[0].message == HELLO
    router.send(NAME, Welcome())
    assert line.turn() == ["welcome"]


def test_a_refusal_ends_the_main_loop(router, connect, receive):
    line = Line(connect(NAME))
    receive(router)
    router.send(NAME, Refused("wrong"))
    with pytest.raises(RouterRefusedError, match="the router refused this process: wrong"):
        line.turn()


def run_async(context, endpoints, scenario) -> None:
    """Run `scenario(link, peer)` on a loop, and close the link."""

    async def run() -> None:
        peer = Peer()
        link = AsyncRouterLink(
            DealerSocket(context, endpoints.router, NAME, ANY_MESSAGE), HELLO, peer
        )
        try:
            await asyncio.wait_for(scenario(link, peer), SECONDS)
        finally:
            await link.close()
            await link.close()

    asyncio.run(run())


async def answer(receive, router: RouterSocket, message) -> None:
    """Wait for a hello and answer it."""
    (received,) = await asyncio.to_thread(receive, router)
    assert received.message == HELLO
    router.send(NAME, message)


def test_inside_asyncio_a_loss_shows_at_the_socket(context, endpoints, receive):
    async def scenario(link, peer) -> None:
        first_context = zmq.Context()
        first = RouterSocket(first_context, endpoints.router, ANY_MESSAGE)
        await asyncio.gather(link.open(SECONDS), answer(receive, first, Welcome()))
        assert link.send(CANCEL)
        first_context.destroy(linger=0)
        while "lost" not in peer.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not link.send(CANCEL)
        second = RouterSocket(context, endpoints.router, ANY_MESSAGE)
        await answer(receive, second, Refused("another configuration"))
        assert "another configuration" in str(await link.refusal)
        assert peer.told == ["welcome", "lost"]

    run_async(context, endpoints, scenario)


def test_inside_asyncio_a_refusal_or_silence_at_first_is_an_error(context, endpoints, receive):
    async def scenario(link, peer) -> None:
        with pytest.raises(LinkError, match=r"the router did not answer within 0\.05 s"):
            await link.open(0.05)

    run_async(context, endpoints, scenario)
    router = RouterSocket(context, endpoints.router, ANY_MESSAGE)

    async def refused(link, peer) -> None:
        with pytest.raises(RouterRefusedError, match="the router refused this process: wrong"):
            await asyncio.gather(link.open(SECONDS), answer(receive, router, Refused("wrong")))

    run_async(context, endpoints, refused)
