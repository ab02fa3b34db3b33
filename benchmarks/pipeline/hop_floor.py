"""What ZeroMQ alone costs on this machine: a message to another process and back.

The sender pauses between two messages, so that all threads are asleep when one comes, as they are
between two requests: on a virtual machine, waking them is most of the cost.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

PAUSE_SECONDS = 0.002
REPLY_MS = 10_000
END = b"end"


def round_trips(count: int) -> list[float]:
    """Seconds of `count` round trips: two hops each, every hop into a sleeping process.

    Raises:
        TimeoutError: the other process does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="di-bench-") as folder:
        endpoint = f"ipc://{Path(folder) / 'hop'}"
        context = zmq.Context()
        near = context.socket(zmq.DEALER)
        near.bind(endpoint)
        echo = subprocess.Popen([sys.executable, "-m", "benchmarks.pipeline.hop_floor", endpoint])
        try:
            for _ in range(20):
                _round_trip(near)
            times = []
            for _ in range(count):
                time.sleep(PAUSE_SECONDS)
                times.append(_round_trip(near))
            near.send(END)
            echo.wait(10)
            return times
        finally:
            echo.kill()
            echo.wait()
            near.close(linger=0)
            context.term()


def _round_trip(near: zmq.Socket[bytes]) -> float:
    began = time.perf_counter()
    near.send_multipart([b"h" * 50, b"p" * 124])
    if not near.poll(REPLY_MS):
        raise TimeoutError("the echo process does not answer")
    near.recv_multipart()
    return time.perf_counter() - began


def echo_forever(endpoint: str) -> None:
    """Send everything back until told to end, or nothing has come for REPLY_MS."""
    context = zmq.Context()
    far = context.socket(zmq.DEALER)
    far.connect(endpoint)
    while far.poll(REPLY_MS):
        frames = far.recv_multipart()
        if frames == [END]:
            break
        far.send_multipart(frames)
    far.close(linger=0)
    context.term()


if __name__ == "__main__":
    echo_forever(sys.argv[1])
