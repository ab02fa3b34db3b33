"""What a chat template may take: it is a program, and a client has a say in what it works on.

Measured and refused within the process, for some 40 µs a prompt. A single operation that takes long is
interrupted where Python looks for signals, as its arithmetic does; otherwise the limit on memory bounds it.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from frontend.tokenizer.errors import PromptError

_RAISE_AGAIN_SECONDS: Final = 0.1
_PAGE_BYTES: Final = resource.getpagesize()


class RenderLimitError(PromptError):
    """The template would take more time, memory or text than these messages may."""

    code = "template_limit"

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"The model's chat template needs more than {limit} for these messages.", "messages"
        )
        self.limit = limit


@dataclass(frozen=True)
class RenderLimits:
    cpu_seconds: float
    """Of the processor, so that a busy machine refuses nobody."""
    memory_bytes: int
    """Beyond what the process has."""
    text_chars: int

    @staticmethod
    def of(payload_bytes: int) -> RenderLimits:
        """For a conversation of this size. What templates really do with one takes a hundredth."""
        return RenderLimits(
            cpu_seconds=2.0 + payload_bytes / (256 << 10),
            memory_bytes=(512 << 20) + 32 * payload_bytes,
            text_chars=(1 << 20) + 8 * payload_bytes,
        )


class _OutOfTime(BaseException):
    """Not an `Exception`, lest the code that it interrupts takes it for one of its own."""


def bounded(render: Callable[[], str], limits: RenderLimits) -> str:
    """What `render` returns. Main thread only, for it needs a signal.

    Raises:
        RenderLimitError: it takes more than `limits`.
    """
    try:
        with _time_limit(limits.cpu_seconds), _memory_limit(limits.memory_bytes):
            text = render()
    except _OutOfTime:
        raise RenderLimitError(f"{limits.cpu_seconds:.0f} s of processor time") from None
    except MemoryError:
        raise RenderLimitError(f"{limits.memory_bytes >> 20} MiB of memory") from None
    if len(text) > limits.text_chars:
        raise RenderLimitError(f"{limits.text_chars} characters")
    return text


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    previous = signal.signal(signal.SIGPROF, _raise_out_of_time)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, _RAISE_AGAIN_SECONDS)
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        # Also where the signal came just before the timer was stopped.
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _raise_out_of_time(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _OutOfTime


@contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([pages * _PAGE_BYTES + more, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
