"""Stacks of threads as data."""

from __future__ import annotations

import threading

from transport.stacks import MAX_FRAMES, thread_stacks


def wait_in_a_named_function(started: threading.Event, end: threading.Event) -> None:
    secret = "a user's text"  # noqa: F841  must not be told
    started.set()
    end.wait()


def test_a_thread_is_told_with_its_name_and_where_it_is():
    started, end = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=wait_in_a_named_function, args=(started, end), name="the one that waits"
    )
    thread.start()
    started.wait()
    stacks = thread_stacks()
    end.set()
    thread.join()
    assert stacks[0].name == "MainThread"
    found = next(stack for stack in stacks if stack.name == "the one that waits")
    assert found.native_id == thread.native_id
    call = next(frame for frame in found.frames if frame.function == "wait_in_a_named_function")
    assert (call.file, call.code) == (__file__, "end.wait()")
    # The outermost call comes first.
    assert found.frames.index(call) < len(found.frames) - 1
    assert "a user's text" not in repr(stacks)


def test_of_a_deep_stack_the_innermost_calls_are_told():
    def dive(depth: int):
        return dive(depth - 1) if depth else thread_stacks()

    frames = dive(2 * MAX_FRAMES)[0].frames
    assert len(frames) == MAX_FRAMES
    assert "thread_stacks" in [frame.function for frame in frames[-3:]]
