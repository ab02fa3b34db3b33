"""The largest frame that a link may carry. Who is sent a larger one drops the connection before it takes
memory for it, and who would send one is told so; ZMQ itself knows no limit.
"""

from __future__ import annotations

from typing import Final

REPORT_BYTES: Final = 64 << 20
"""Of what concerns the instance: states, snapshots, the state report, metrics, stacks. The largest, a
report on 100,000 waiting requests, has some 30 MB. So much is left to every link."""
SUBSCRIPTION_BYTES: Final = 256
"""Of what a publisher is sent: topics."""


def prompt_frame_bytes(max_body_bytes: int) -> int:
    """Of the router's links, whose largest frames are prompts.

    A body of token ids is twice as large as four bytes an id: two characters, `1,`, are the shortest. A
    conversation comes out of the frontend about as long as it came in.
    """
    return max(2 * max_body_bytes + (1 << 20), REPORT_BYTES)
