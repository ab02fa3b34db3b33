"""What all clients of a live instance have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from daemon.errors import DeepInferError
from daemon.system.run_directory import instance_name, not_running, running_pid


class InstanceClient(ABC):
    """Owner of sockets to an instance. Use it as a context manager, on one thread."""

    def __init__(self, run_dir: Path, instance: str) -> None:
        """Look for the instance.

        Raises:
            DeepInferError: the instance does not run.
        """
        self._run_dir, self._instance = run_dir, instance
        self._check_alive()
        self._instance = instance_name(run_dir, instance)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Free the sockets. Idempotent."""

    def _check_alive(self) -> int:
        """The daemon's process id.

        Raises:
            DeepInferError: the instance has ended.
        """
        pid = running_pid(self._run_dir)
        if pid is None:
            raise DeepInferError(not_running(self._run_dir, self._instance))
        return pid

    def _other_version(self) -> DeepInferError:
        return DeepInferError(
            f"Instance {self._instance!r} speaks another version of the protocol: "
            "use the command line that it was started with."
        )
