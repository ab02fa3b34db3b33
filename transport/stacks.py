"""Where the threads of this process are, as data: for looking into a process that hangs.

Only code locations are told, never the values of variables: those may be a user's text.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

import msgspec

MAX_FRAMES = 200


class StackFrame(msgspec.Struct, frozen=True):
    """One call."""

    file: str
    line: int
    function: str
    code: str
    """The source line; empty if the source is not there."""


class ThreadStack(msgspec.Struct, frozen=True):
    """One Python thread."""

    name: str
    native_id: int | None
    """The kernel's thread id; None for a thread that Python did not start."""
    frames: list[StackFrame]
    """Outermost call first; of a very deep stack the innermost MAX_FRAMES."""


def thread_stacks() -> list[ThreadStack]:
    """The stacks of all Python threads now, the main thread's first. From any thread."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    current = sys._current_frames()
    stacks = []
    for ident in sorted(current, key=lambda ident: (ident != main, ident)):
        thread = threads.get(ident)
        name = f"thread {ident}" if thread is None else thread.name
        native_id = None if thread is None else thread.native_id
        stacks.append(ThreadStack(name, native_id, _frames(current[ident])))
    return stacks


def _frames(innermost: FrameType) -> list[StackFrame]:
    found = traceback.StackSummary.extract(traceback.walk_stack(innermost), limit=MAX_FRAMES)
    return [
        StackFrame(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in reversed(found)
    ]
