"""What is seen of the instance from beside: `/health`, and the memory of its processes."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from typing import Final

import psutil

HEALTH_SECONDS: Final = 0.2
MEMORY_SECONDS: Final = 2.0
TIMEOUT_SECONDS: Final = 60.0


class Watch:
    """Threads that look again and again, for as long as the block lasts."""

    def __init__(self, port: int, daemon: psutil.Process) -> None:
        self._url = f"http://127.0.0.1:{port}/health"
        self._daemon = daemon
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=target) for target in (self._ask, self._weigh)]
        self.health_seconds: list[float] = []
        self.health_errors = 0
        self.most: dict[str, int] = {}
        """Bytes at the worst moment that was seen, by process."""

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._ended.wait(HEALTH_SECONDS):
            began = time.perf_counter()
            try:
                urllib.request.urlopen(self._url, timeout=TIMEOUT_SECONDS).read()
            except OSError:
                self.health_errors += 1
            self.health_seconds.append(time.perf_counter() - began)

    def _weigh(self) -> None:
        while not self._ended.wait(MEMORY_SECONDS):
            for name, size in memory(self._daemon).items():
                self.most[name] = max(size, self.most.get(name, 0))


def memory(daemon: psutil.Process) -> dict[str, int]:
    """Resident bytes of the instance's processes, by name."""
    found = {"daemon": daemon.memory_info().rss}
    for process in daemon.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()).partition(" [")[0].removeprefix("deepinfer:")
            if process.ppid() != daemon.pid:
                title = "body reader" if "reader" in title else f"forks of {title}"
            found[title] = found.get(title, 0) + process.memory_info().rss
    return found
