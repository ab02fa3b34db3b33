"""Sending without losing: what a peer does not take now is kept for it and sent later.

Tokens are not kept, for they come without end: a request whose tokens cannot be sent must be ended
by who sends. The rest is a few messages for each live request, so admission bounds it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from transport.framing import Payload
from transport.ids import ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import ALL_CHOICES, Cancel, TokenBatch
from transport.sockets import Received

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outgoing:
    """A message to be sent. With `forward`, the received message goes on as it came."""

    peer: ProcessName
    message: Message | None
    frames: tuple[Payload, ...] = ()
    forward: Received[Message] | None = None

    @property
    def header(self) -> Message:
        if self.forward is not None:
            return self.forward.message
        assert self.message is not None
        return self.message


SendResult = Literal["sent", "kept", "lost"]


class SendingSocket(Protocol):
    """The part of `RouterSocket` that is needed."""

    def send(self, peer: ProcessName, message: Message, *frames: Payload) -> bool: ...

    def forward(self, peer: ProcessName, received: Received[Message]) -> bool: ...


class Outbox:
    """What waits to be sent, by peer and request. The order is kept for each request."""

    def __init__(self, socket: SendingSocket) -> None:
        self._socket = socket
        self._kept: dict[ProcessName, dict[RequestId, list[Outgoing]]] = {}

    @property
    def num_kept(self) -> int:
        return sum(len(items) for peer in self._kept.values() for items in peer.values())

    def send(self, item: Outgoing) -> SendResult:
        """Send or keep; what is `lost` is a `TokenBatch`."""
        has_room = item.peer not in self._kept
        if has_room and self._sent(item):
            return "sent"
        if isinstance(item.header, TokenBatch):
            # It may overtake: what is kept for a request comes before its first or after its last.
            return "sent" if not has_room and self._sent(item) else "lost"
        self._keep(item)
        return "kept"

    def retry(self) -> Iterator[Outgoing]:
        """Send what has been kept to those who take it by now; yields what is sent."""
        for peer, kept in list(self._kept.items()):
            while kept:
                request_id, items = next(iter(kept.items()))
                while items and self._sent(items[0]):
                    yield items.pop(0)
                if items:
                    break
                del kept[request_id]
            if not kept:
                del self._kept[peer]
                log.info("%s takes messages again", peer)

    def forget(self, peer: ProcessName) -> None:
        self._kept.pop(peer, None)

    def _sent(self, item: Outgoing) -> bool:
        if item.forward is not None:
            return self._socket.forward(item.peer, item.forward)
        return self._socket.send(item.peer, item.header, *item.frames)

    def _keep(self, item: Outgoing) -> None:
        if item.peer not in self._kept:
            log.warning("%s does not take messages: they are kept for it", item.peer)
        kept = self._kept.setdefault(item.peer, {})
        request_id: RequestId = getattr(item.header, "request_id", RequestId(""))
        if isinstance(item.header, Cancel) and item.header.index == ALL_CHOICES:
            kept[request_id] = [item]  # what was to be done before need not be begun
        else:
            kept.setdefault(request_id, []).append(item)
