"""The frontend's line to the router."""

from __future__ import annotations

import asyncio

import pytest

from frontend.errors import ApiError
from frontend.generation.request import Prompt
from frontend.links.router_client import RouterClient
from frontend.metrics import FrontendMetrics
from transport.ids import RequestId
from transport.messages.generate import Encode
from transport.sockets import FrameTooLargeError
from transport.telemetry.metrics import MetricSet


def test_a_prompt_that_the_line_does_not_carry_is_told_to_its_client():
    def send(message: object, *_: object) -> bool:
        if isinstance(message, Encode):
            raise FrameTooLargeError(1000, 500)
        return True

    client = RouterClient(send, FrontendMetrics(MetricSet()))
    with pytest.raises(ApiError, match="more than 500 bytes") as caught:
        asyncio.run(client.encode(RequestId("r-1"), Prompt("text", b"x")))
    assert caught.value.status == 413
