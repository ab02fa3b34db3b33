"""Messages that only workers get."""

from __future__ import annotations

from transport.ids import ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import SamplingParams


class Start(Message, frozen=True):
    """Run one choice. Frame 0: int32 ids of the prompt and of the tokens generated so far (there are
    some when the choice moves here from a lost worker)."""

    request_id: RequestId
    index: int
    frontend: ProcessName
    prompt_len: int
    sampling: SamplingParams
    priority: int
    arrival: float
    prefix_cache: bool = True
    cache_salt: str = ""
