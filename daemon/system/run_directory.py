"""The run directory of an instance: where it is, who owns it, what is in it.

The lock comes before everything else: a second bind of an `ipc://` path succeeds and silently
steals the socket, so only the holder of the lock may bind. The kernel frees the lock when its
holder dies, which is also how `stop` knows that an instance is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import select
import shlex
import signal
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from daemon.errors import ConfigurationError, DeepInferError
from daemon.system.operator_text import require_utf8
from daemon.system.private_path import UntrustedPathError, check_private_path
from daemon.system.process_start import boot_id, seconds_at_start
from transport.sockets import SOCKET_FILES, Endpoints

log = logging.getLogger(__name__)

SYSTEM_DIRECTORY: Final = Path("/run/deepinfer")
"""Where the instances of root and of systemd have their run directories."""
LOCK_FILE: Final = "lock"
PID_FILE: Final = "daemon.pid"
CHILDREN_FILE: Final = "children.json"
NAME_FILE: Final = "instance"
LOG_FILE: Final = "deepinfer.log"
OLDER_LOG_FILE: Final = f"{LOG_FILE}.1"
LOG_FILES: Final = (LOG_FILE, OLDER_LOG_FILE)
OWN_FILES: Final = (
    *SOCKET_FILES, CHILDREN_FILE, f"{CHILDREN_FILE}.new", PID_FILE, NAME_FILE, *LOG_FILES,
)  # fmt: skip
_NOTIFY_FILE: Final = re.compile(r"n(\d+)\.sock")
_LEFTOVER_SECONDS: Final = 10.0
_ROOM_BYTES: Final = 64 << 10
_ROOM_FILES: Final = 16
"""Sockets, process ids and names; the log comes on top."""


def choose_run_directory(instance: str, wanted: Path | None) -> Path:
    """The run directory of `instance`: `wanted`, else the first place that fits (see --run-dir).

    Raises:
        ConfigurationError: it is not UTF-8, or a socket path in it would be too long.
    """
    path = wanted.absolute() if wanted is not None else _default_directory(instance)
    require_utf8("The run directory", str(path))
    problem = Endpoints(str(path)).path_problem()
    if problem is not None:
        raise ConfigurationError(problem[0].upper() + problem[1:] + ".")
    return path


def find_run_directory(instance: str, wanted: Path | None) -> Path:
    """Where `instance` runs, for those who ask it: also where systemd has started it.

    Raises:
        ConfigurationError: it is not UTF-8, or a socket path in it would be too long.
        DeepInferError: the directory belongs to another user.
    """
    path = choose_run_directory(instance, wanted)
    of_system = SYSTEM_DIRECTORY / instance
    if wanted is None and running_pid(path) is None and of_system.is_dir():
        return of_system
    return path


def _default_directory(instance: str) -> Path:
    from_systemd = os.environ.get("RUNTIME_DIRECTORY", "")
    if from_systemd:
        return Path(from_systemd.split(":")[0])
    user_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    if user_dir.startswith("/") and _is_ours(Path(user_dir)):
        return Path(user_dir) / "deepinfer" / instance
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return SYSTEM_DIRECTORY / instance
    return _temporary_directory() / instance


def _temporary_directory() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"deepinfer-{os.geteuid()}"


def _is_ours(path: Path) -> bool:
    """False for the directory of the user whom `su` has been called by."""
    return os.access(path, os.W_OK) and path.stat().st_uid == os.geteuid()


def running_pid(path: Path) -> int | None:
    """Pid of the daemon that holds the run directory's lock, or None if nobody does. The pid is what
    the daemon has written down; see `holds_lock`.

    Raises:
        DeepInferError: the directory belongs to another user, or another one can exchange it.
    """
    try:
        check_private_path(path, _owner_for_root(path))
        with (path / LOCK_FILE).open("r+b") as lock:
            # Only asks: taking the lock to test it would make a start at this moment fail.
            answer = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _whole_file_lock(fcntl.F_WRLCK))
            if struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK:
                return _read_pid(path)
    except FileNotFoundError:
        return None
    except UntrustedPathError as error:
        raise DeepInferError(
            f"The run directory {path} cannot be trusted, for {error}: run this as its owner, or name "
            "another one with --run-dir."
        ) from error
    except OSError as error:
        raise DeepInferError(
            f"The run directory {path} cannot be read ({error.strerror}): run this as its owner."
        ) from error
    return None


def _owner_for_root(path: Path) -> int | None:
    """Root may ask about the instances of all users, but takes none of them for its own."""
    if os.geteuid() != 0 or path.is_relative_to(_temporary_directory()):
        return None
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_uid
    return None


def holds_lock(pid: int, path: Path) -> bool:
    """Whether process `pid` has the lock file of the run directory open, as only its daemon has: the
    kernel does not tell who holds a lock of this kind. A process that this user may not look into is
    believed: only its owner has written its number down."""
    try:
        lock = (path / LOCK_FILE).lstat()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(entry.stat(), lock):
                    return True
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _read_pid(path: Path) -> int:
    """0 while the daemon has locked the directory but not written its pid yet."""
    try:
        return int((path / PID_FILE).read_text())
    except (OSError, ValueError):
        return 0


def instance_name(path: Path, asked: str) -> str:
    """Name of the instance that runs in `path`; `asked` where none does, or has just begun."""
    try:
        return (path / NAME_FILE).read_text().strip() or asked
    except OSError:
        return asked


def notify_path(path: Path) -> Path:
    """The socket of `deepinfer start`, this process, to which the instance says that it is ready.

    Its name is short, not longer than those of the instance's own: a path has at most 107 bytes.
    """
    return path / f"n{os.getpid()}.sock"


def make_run_directory(path: Path) -> None:
    """Create the directory, mode 0700, or check that the one there is ours.

    Raises:
        DeepInferError: it cannot be made, or another user owns or can exchange it.
    """
    try:
        check_private_path(path)
        _check_room(path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        path.mkdir(exist_ok=True, mode=0o700)
        # Again, with what was made: from here on nobody else can exchange anything.
        check_private_path(path)
        status = path.lstat()
        if status.st_uid != os.geteuid():
            raise UntrustedPathError(f"{path} belongs to user {status.st_uid}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied")
    except UntrustedPathError as error:
        raise DeepInferError(
            f"The run directory {path} cannot be trusted, for {error}: "
            "choose another one with --run-dir."
        ) from error
    except OSError as error:
        raise _unusable(path, error) from error


def _check_room(path: Path) -> None:
    """Full file systems are known before any process needs them."""
    place = next(p for p in (path, *path.parents) if p.exists())
    found = os.statvfs(place)
    # A file system without a limit counts none at all.
    free_bytes = found.f_bavail * found.f_frsize if found.f_blocks else _ROOM_BYTES
    free_files = found.f_favail if found.f_files else _ROOM_FILES
    if free_bytes < _ROOM_BYTES or free_files < _ROOM_FILES:
        raise DeepInferError(
            f"The file system of the run directory {path} is full ({free_bytes >> 10} KiB and "
            f"{free_files} files are left): make room in {place}, or choose another one with --run-dir."
        )


def _unusable(path: Path, error: OSError) -> DeepInferError:
    reason = (error.strerror or str(error)).lower()
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = f"make room in {path.parent}, or " if is_full else ""
    return DeepInferError(
        f"The run directory {path} cannot be used ({reason}): {advice}"
        "choose a writable one with --run-dir."
    )


@dataclass
class RunDirectory:
    """The locked directory of this daemon's instance. Close it to remove what is in it."""

    path: Path
    _lock_fd: int
    keep_log: bool = False
    """Leave the log where it is: what has ended may want an explanation."""

    @classmethod
    def lock(cls, path: Path, instance: str) -> RunDirectory:
        """Create and lock the directory, end and remove what an earlier daemon left in it.

        Raises:
            DeepInferError: the instance runs already, or the directory cannot be used.
        """
        make_run_directory(path)
        try:
            directory = cls(path, _take_lock(path, instance))
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            _end_leftover_children(path)
            directory._remove_files(keep=LOG_FILES)
            (path / PID_FILE).write_text(f"{os.getpid()}\n")
            (path / NAME_FILE).write_text(f"{instance}\n")
        except OSError as error:
            directory.close()
            raise _unusable(path, error) from error
        except BaseException:
            directory.close()
            raise
        return directory

    def record_children(self, pids: list[int]) -> None:
        """Write the children down, so that the next daemon can wait for them if this one is
        killed."""
        rows = []
        for pid in pids:
            with contextlib.suppress(OSError):
                rows.append([pid, seconds_at_start(pid)])
        temporary = self.path / f"{CHILDREN_FILE}.new"
        try:
            temporary.write_text(json.dumps({"boot": boot_id(), "children": rows}))
            temporary.replace(self.path / CHILDREN_FILE)
        except OSError as error:
            # The kernel ends them with this daemon all the same.
            log.warning("%s cannot be written (%s): make room in it", self.path, error.strerror)

    def close(self) -> None:
        """Remove our files and, if nothing stays in it, the directory; then free the lock. Idempotent."""
        if self._lock_fd < 0:
            return
        self._remove_files(keep=LOG_FILES if self.keep_log else ())
        with contextlib.suppress(OSError):
            (self.path / LOCK_FILE).unlink()
        # Fails where others have files in it, or where systemd owns the parent: both are fine.
        with contextlib.suppress(OSError):
            self.path.rmdir()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _remove_files(self, keep: tuple[str, ...] = ()) -> None:
        for name in OWN_FILES:
            if name not in keep:
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
        with contextlib.suppress(OSError):
            for entry in list(self.path.iterdir()):
                # Of a `deepinfer start` that was killed; others may be waiting at theirs.
                found = _NOTIFY_FILE.fullmatch(entry.name)
                if found is not None and not psutil.pid_exists(int(found[1])):
                    entry.unlink()


def _whole_file_lock(kind: int) -> bytes:
    """A C `struct flock`: type, whence, start, length, pid."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def _take_lock(path: Path, instance: str) -> int:
    lock_path = path / LOCK_FILE
    while True:
        lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.fcntl(lock_fd, fcntl.F_OFD_SETLK, _whole_file_lock(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError):
            os.close(lock_fd)
            raise DeepInferError(already_running(path, instance)) from None
        # The last holder may have removed the file between our open and our lock.
        try:
            if os.path.samestat(os.fstat(lock_fd), lock_path.stat()):
                return lock_fd
        except FileNotFoundError:
            make_run_directory(path)
        os.close(lock_fd)


def already_running(path: Path, instance: str) -> str:
    pid, name = _read_pid(path), instance_name(path, instance)
    process = f" (process {pid})" if pid else ""
    other = "--instance NAME" if _is_default(path, name) else "another --run-dir"
    return (
        f"Instance {name!r} is already running{process}: stop it with "
        f"`deepinfer stop {_target_options(path, name)}`, or start another one with {other}."
    )


def not_running(path: Path, instance: str) -> str:
    place = "" if _is_default(path, instance) else f" in {path}"
    log = path / LOG_FILE
    return (
        f"Instance {instance!r} is not running{place}: start it with "
        f"`deepinfer start {_target_options(path, instance)}`."
        + (f" The log of its last run is {log}." if log.exists() else "")
    )


def _is_default(path: Path, instance: str) -> bool:
    return path in (_default_directory(instance), SYSTEM_DIRECTORY / instance)


def _target_options(path: Path, instance: str) -> str:
    if _is_default(path, instance):
        return f"--instance {instance}"
    name = "" if instance == "default" else f"--instance {instance} "
    return f"{name}--run-dir {shlex.quote(str(path))}"


def _end_leftover_children(path: Path) -> None:
    """End the children of a killed daemon, which the kernel is about to end anyway."""
    for pid, started in _recorded_children(path):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if seconds_at_start(pid) != started:
                continue
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not has_ended(pidfd, _LEFTOVER_SECONDS):
                raise DeepInferError(
                    f"Process {pid}, left over from a killed daemon, does not end: "
                    "wait for it or restart the machine."
                )
        except (FileNotFoundError, ProcessLookupError):
            continue
        finally:
            os.close(pidfd)


def _recorded_children(path: Path) -> list[tuple[int, float]]:
    """Process id and start of each; none where another boot, or another version, has written them."""
    try:
        record = json.loads((path / CHILDREN_FILE).read_text())
        if record["boot"] != boot_id():
            return []
        return [(int(pid), float(started)) for pid, started in record["children"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def has_ended(pidfd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
