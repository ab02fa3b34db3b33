"""The fork that encodes a long prompt."""

from __future__ import annotations

import os
import select

from frontend.tokenizer.forked_encode import Answer, ForkedEncode
from transport.ids import RequestId
from transport.messages.generate import RequestFailed


def test_the_fork_gives_way_to_those_that_serve_everybody():
    def tell_niceness() -> Answer:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        return Answer(RequestFailed(RequestId("a"), 400, "told", str(niceness)))

    fork = ForkedEncode(RequestId("a"), tell_niceness)
    try:
        while (answer := fork.read()) is None:
            assert select.select([fork.fd], [], [], 60.0)[0], "the fork tells nothing"
    finally:
        fork.close()
    assert int(answer.message.message) > os.getpriority(os.PRIO_PROCESS, 0)
