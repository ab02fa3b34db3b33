"""What can be known to fail before any process is started, each as one sentence."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from daemon.configuration.config import DEFAULT_MODEL, InstanceConfig
from daemon.default_model.fetch import DefaultModelError, ensure_default_model
from daemon.errors import ConfigurationError, DeepInferError
from daemon.system.accelerator import nvidia_devices
from daemon.system.operator_text import require_utf8

DESCRIPTORS_BASE: Final = 256
THREADS_PER_PROCESS: Final = 8
"""Includes those that libraries start for themselves; a worker has one more per core."""
CAP_SYS_ADMIN: Final = 1 << 21
CAP_SYS_RESOURCE: Final = 1 << 24
TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tiktoken.model",
)  # fmt: skip

MODEL_SUFFIXES: Final = (".json", ".safetensors", ".bin", ".model", ".jinja")


def find_model(model: str, progress: Callable[[str], None]) -> Path:
    """Directory of the model; fetches the default one if it is not there yet.

    Raises:
        ConfigurationError: there is no such checkpoint, or it lacks files.
        DeepInferError: the default model cannot be fetched.
    """
    if model.lower() == DEFAULT_MODEL.lower() and not Path(model).is_dir():
        try:
            return ensure_default_model(progress)
        except DefaultModelError as error:
            raise DeepInferError(str(error)) from error
    path = Path(model).expanduser().absolute()
    require_utf8("The model path", str(path))
    try:
        if not path.exists():
            raise ConfigurationError(
                f"The model {path} does not exist: give a directory with a Hugging Face checkpoint "
                f"with --model, or {DEFAULT_MODEL}."
            )
        if not path.is_dir():
            raise ConfigurationError(
                f"The model {path} is a file: give the directory that holds config.json."
            )
        names = {entry.name for entry in path.iterdir()}
    except PermissionError as error:
        raise ConfigurationError(
            f"The model directory {path} cannot be read by user {os.geteuid()} ({error.strerror}): let "
            "this user read it and enter the directories above it, or keep the model elsewhere."
        ) from error
    _check_files(path, names)
    return path


def _check_files(path: Path, names: set[str]) -> None:
    if "config.json" not in names:
        snapshots = sorted(path.glob("snapshots/*/config.json"))
        hint = f" Did you mean {snapshots[-1].parent}?" if snapshots else ""
        raise ConfigurationError(
            f"The model directory {path} has no config.json: it is no Hugging Face checkpoint.{hint}"
        )
    if not names.intersection(TOKENIZER_FILES):
        raise ConfigurationError(f"The model directory {path} has no tokenizer (tokenizer.json).")
    for name in sorted(names):
        if name.endswith(MODEL_SUFFIXES) and not os.access(path / name, os.R_OK):
            raise ConfigurationError(
                f"The model's file {path / name} cannot be read: let this user read it, "
                "or complete the checkpoint."
            )


def check_devices(config: InstanceConfig, accelerator: str) -> None:
    """Whether each rank gets a GPU.

    Raises:
        ConfigurationError: there are fewer GPUs than workers.
    """
    if accelerator == "nvidia" and len(nvidia_devices()) < config.dp:
        raise ConfigurationError(
            f"--dp {config.dp} needs {config.dp} GPUs, but {len(nvidia_devices())} can be used: "
            "lower --dp, or set DEEPINFER_ACCELERATOR=cpu."
        )


def raise_descriptor_limit(config: InstanceConfig) -> None:
    """Lift the soft limit on open files to the hard one; children inherit it.

    Raises:
        DeepInferError: even the hard limit is too low.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_BASE + 2 * config.max_waiting
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise DeepInferError(
            f"Only {hard} files may be open, but {wanted} are needed for --max-waiting "
            f"{config.max_waiting}: raise the limit (ulimit -n) or lower --max-waiting."
        )
    limit = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def check_thread_limit(config: InstanceConfig) -> None:
    """Whether this user may start as many threads as an instance has: the limit on processes counts
    threads, and a library that gets none aborts its process.

    Raises:
        DeepInferError: the limit is too low.
    """
    _soft, limit = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    if limit == resource.RLIM_INFINITY or _may_exceed_limits():
        return
    processes = 2 + config.dp + config.tokenizers + config.frontends
    cores = 0 if config.engine == "fake" else len(os.sched_getaffinity(0))
    wanted = THREADS_PER_PROCESS * processes + cores * config.dp
    taken = _threads_of_this_user()
    if taken + wanted > limit:
        raise DeepInferError(
            f"This user may have {limit} threads and has {taken}, but an instance with these options "
            f"needs about {wanted}: raise the limit (ulimit -u), or lower --dp or --frontends."
        )


def _may_exceed_limits() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.getuid() == 0 or bool(effective & (CAP_SYS_ADMIN | CAP_SYS_RESOURCE))


def _threads_of_this_user() -> int:
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                found += process.num_threads()
    return found
