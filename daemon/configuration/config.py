"""The configuration of an instance: every option once, with type, default, unit and help text.

The command line, the environment and the TOML file are all derived from this one dataclass; see
`daemon/configuration/sources.py` for their precedence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from daemon.router.settings import Routing
from hicache.copies.copy_choice import CopyChoice
from transport.logs import LogLevel
from workers.settings import Accelerator, DType, EngineKind, KVDType, LoadFormat

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
INSTANCE_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

ORIGIN_PATTERN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s*,@]+")

SamplingSource = Literal["model", "openai"]

_MODEL = Parameter(group=Group("Model", sort_key=1))
_INSTANCE = Parameter(group=Group("Instance and processes", sort_key=2))
_ENGINE = Parameter(group=Group("Engine", sort_key=3))
_CACHE = Parameter(group=Group("Prefix cache", sort_key=3.5))
_HTTP = Parameter(group=Group("HTTP", sort_key=4))
_ADMISSION = Parameter(group=Group("Admission and routing", sort_key=5))
_LIFE = Parameter(group=Group("Life and death", sort_key=6))
_TESTING = Parameter(group=Group("For tests and pipeline benchmarks", sort_key=7))


def _within(least: float, most: float | None = None) -> Parameter:
    return Parameter(validator=Number(gte=least, lte=most))


_NOT_NEGATIVE = _within(0)
_AT_LEAST_ONE = _within(1)
_ABOVE_ZERO = Parameter(validator=Number(gt=0))
_SHARE = Parameter(validator=Number(gt=0, lte=1))


def check_origins(_type: object, values: tuple[str, ...]) -> None:
    """An origin is what browsers send: no path, no pattern, and not `null`, which is every sandbox.

    Raises:
        ValueError: one of them is no origin.
    """
    for value in values:
        if not ORIGIN_PATTERN.fullmatch(value):
            raise ValueError(
                f"{value!r} is no origin: write scheme, host and port as browsers send them, such as "
                "https://chat.example or http://localhost:3000."
            )


_ORIGINS = Parameter(validator=check_origins, negative=())


def check_instance_name(_type: object, value: str) -> None:
    """Instance names become directory and unit names.

    Raises:
        ValueError: the name has other characters, or is too long.
    """
    if not INSTANCE_PATTERN.fullmatch(value):
        raise ValueError(
            "An instance name starts with a letter or digit, goes on with letters, digits, "
            "'_', '.' or '-', and has at most 64 characters."
        )


def read_overrides(text: str) -> dict[str, object]:
    """`--hf-overrides` as an object; empty text is an empty one.

    Raises:
        ValueError: it is no JSON object.
    """
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"--hf-overrides takes a JSON object such as '{{\"num_hidden_layers\": 2}}': {error}."
        ) from error


def _check_overrides(_type: object, value: str) -> None:
    read_overrides(value)


InstanceName = Annotated[
    str,
    Parameter(
        validator=check_instance_name, help="Name of the instance; several run side by side."
    ),
]
RunDir = Annotated[
    Path | None,
    Parameter(
        help="Directory of the instance's sockets (made if missing, removed at the end). "
        "Default: $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/deepinfer/INSTANCE, "
        "/run/deepinfer/INSTANCE or /tmp/deepinfer-UID/INSTANCE, the first that fits."
    ),
]
ConfigFile = Annotated[
    Path | None,
    Parameter(help="TOML file with options. Default: /etc/deepinfer/INSTANCE.toml, if it exists."),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class InstanceConfig:
    """All options of an instance, each with its help. None: found out at start, as the help says."""

    model: Annotated[str, _MODEL] = DEFAULT_MODEL
    """SmolLM2-135M-Instruct (fetched once) or a directory with a Hugging Face checkpoint;
    $DEEPINFER_HF_MODEL_DIR names it too."""
    served_model_name: Annotated[str | None, _MODEL] = None
    """Model id in the API. Default: the model's own name."""
    dtype: Annotated[DType, _MODEL] = "auto"
    """Type of weights and KV. auto: the checkpoint's; float32 on a CPU."""
    load_format: Annotated[LoadFormat, _MODEL] = "auto"
    """dummy: random weights of the real shape, for benchmarks."""
    hf_overrides: Annotated[str, _MODEL, Parameter(validator=_check_overrides)] = ""
    """JSON object (in a TOML file a table will do) with entries of config.json to replace (nested
    ones are merged), with --load-format dummy for experiments with shapes. Fewer num_hidden_layers
    cut DeepSeek-V4.1 to the first layers of its two halves."""
    sampling_defaults: Annotated[SamplingSource, _MODEL] = "model"
    """How tokens are chosen where a request does not say. model: as the checkpoint's
    generation_config.json says; openai: temperature 1 and nothing else, whatever it says."""
    max_model_len: Annotated[int | None, _MODEL, _AT_LEAST_ONE] = None
    """Prompt plus output, in tokens. Default: the model's."""

    instance: Annotated[InstanceName, _INSTANCE] = "default"
    run_dir: Annotated[RunDir, _INSTANCE] = None
    config: Annotated[ConfigFile, _INSTANCE] = None
    dp: Annotated[int, _INSTANCE, _within(1, most=1024)] = 1
    """Engine workers, each with a copy of the model: one a GPU, or a share of the cores."""
    frontends: Annotated[int, _INSTANCE, _within(1, most=256)] = 1
    """HTTP processes sharing the port."""
    tokenizers: Annotated[int, _INSTANCE, _within(1, most=256)] = 1
    """Tokenizer processes."""
    log_level: Annotated[LogLevel, _INSTANCE] = "info"
    """Least severe level logged."""
    log_mb: Annotated[float, _INSTANCE, _AT_LEAST_ONE] = 32.0
    """Largest size of the log that `start` writes, with its older part, in MB."""

    accelerator: Annotated[Accelerator | None, _ENGINE] = None
    """Default: nvidia where there is such a device, else cpu."""
    max_num_seqs: Annotated[int | None, _ENGINE, _AT_LEAST_ONE] = None
    """Sequences that run at once, per worker. Default: 32 on a CPU, 256 on a GPU."""
    max_batched_tokens: Annotated[int | None, _ENGINE, _AT_LEAST_ONE] = None
    """Prompt tokens per prompt step. Default: 512 on a CPU, 8192 on a GPU."""
    prefill_any_interval: Annotated[int, _ENGINE, _AT_LEAST_ONE] = 1
    """Decode steps between two prompt steps while something decodes."""
    kv_cache_gb: Annotated[float | None, _ENGINE, _ABOVE_ZERO] = None
    """Size of a worker's page pool, in GB. Default: planned from the free memory."""
    kv_dtype: Annotated[KVDType, _ENGINE] = "auto"
    """Type of the KV cache. compact (DeepSeek-V4.1): FP4 main KV and index keys, FP8 windows. auto:
    compact where the checkpoint is quantised so, else as --dtype."""
    yoco_keep_tokens: Annotated[int, _ENGINE, _NOT_NEGATIVE] = 140
    """DeepSeek-V4.1: the last tokens of a prompt that the decoder layers run on (bounded replay).
    0: all of them, which is refused unless --hicache-size-gb is 0 too."""
    deterministic: Annotated[bool, _ENGINE] = False
    """Make the output of a request independent, bit by bit, of what else runs; slower. On a GPU for
    DeepSeek-V4.1 only."""
    gpu_memory_utilization: Annotated[float, _ENGINE, _SHARE] = 0.9
    """Share of a GPU's memory to use where --kv-cache-gb is not given."""

    hicache_size_gb: Annotated[float | None, _CACHE, _NOT_NEGATIVE] = None
    """Host memory for the pages of each worker's prefix cache, in GiB; 0: no prefix cache. Default:
    32 on a GPU, 0.5 on a CPU, less where memory is short."""
    hicache_state_slots: Annotated[int | None, _CACHE, _AT_LEAST_ONE] = None
    """Sliding-window states that each worker's prefix cache keeps beside its pages, for models that
    need them. Default: 4096 on a GPU, 256 on a CPU."""
    hicache_copy: Annotated[CopyChoice, _CACHE] = "auto"
    """How pages travel between a GPU and its prefix cache. batch: the GPU's copy engines, all runs
    of pages in one call; kernel: a few of its processors; auto: by the length of the runs."""

    host: Annotated[str, _HTTP] = "127.0.0.1"
    """Address to listen on; :: and 0.0.0.0 mean every interface."""
    port: Annotated[int, _HTTP, _within(0, most=65535)] = 8888
    """Port to listen on; 0: any free one."""
    api_keys_file: Annotated[Path | None, _HTTP] = None
    """File with one API key a line. Default: no authentication."""
    admin_keys_file: Annotated[Path | None, _HTTP] = None
    """File with the keys that open /metrics and /deepinfer/..., and everything else, too. Default: those
    of --api-keys-file open them."""
    cors_origin: Annotated[tuple[str, ...], _HTTP, _ORIGINS] = ()
    """Origin, such as https://chat.example, whose pages may use the API from a browser; may be given
    more than once. Default: no page may."""
    max_body_mb: Annotated[float, _HTTP, _ABOVE_ZERO] = 32.0
    """Largest request body, in MB."""
    body_buffer_mb: Annotated[float, _HTTP, _ABOVE_ZERO] = 256.0
    """Bodies that a frontend holds while they arrive, in MB; beyond it, the largest is answered 503."""
    max_header_kib: Annotated[int, _HTTP, _AT_LEAST_ONE] = 64
    """Largest request header, in KiB."""
    body_seconds: Annotated[float, _HTTP, _ABOVE_ZERO] = 60.0
    """Time within which a request body must arrive."""
    keep_alive_seconds: Annotated[int, _HTTP, _AT_LEAST_ONE] = 900
    """How long an idle connection stays open; keep it above the clients' own limit."""
    max_choices: Annotated[int, _HTTP, _AT_LEAST_ONE] = 16
    """Largest n of a request."""
    allow_priority: Annotated[bool, _HTTP] = False
    """Let requests overtake others by their field priority; without it, any priority but 0 is refused."""
    stream_high_water_kib: Annotated[int, _HTTP, _AT_LEAST_ONE] = 256
    """Unread KiB of a stream past which its sequence is paused."""
    slow_reader_seconds: Annotated[float, _HTTP, _ABOVE_ZERO] = 60.0
    """How long a paused stream may stay unread."""

    max_waiting: Annotated[int, _ADMISSION, _NOT_NEGATIVE] = 256
    """HTTP requests that may wait for a worker; one more is answered 429."""
    max_waiting_choices: Annotated[int, _ADMISSION, _NOT_NEGATIVE] = 1024
    """Choices (prompts × n) that may wait for a worker; past that a request for more than one is answered
    429."""
    max_waiting_mb: Annotated[float, _ADMISSION, _NOT_NEGATIVE] = 128.0
    """MB of prompts that may wait for a worker; past that a prompt of more than 64 KiB, or a request
    for more than one choice, is answered 429."""
    retry_after: Annotated[int, _ADMISSION, _AT_LEAST_ONE] = 1
    """Seconds in Retry-After of a 429 or 503."""
    routing: Annotated[Routing, _ADMISSION] = "affinity"
    """affinity: a conversation stays with its worker."""
    max_migrations: Annotated[int, _ADMISSION, _NOT_NEGATIVE] = 1
    """How many workers or tokenizers a request may have killed and still be given to another one."""
    stage_timeout: Annotated[float, _ADMISSION, _ABOVE_ZERO] = 60.0
    """Seconds that a request may spend at a tokenizer, or wait for a worker whose processes keep
    dying before they serve (for one that loads: --start-timeout)."""

    drain_timeout: Annotated[float, _LIFE, _NOT_NEGATIVE] = 30.0
    """Seconds that running requests get to end when the instance stops."""
    start_timeout: Annotated[float, _LIFE, _ABOVE_ZERO] = 1800.0
    """Seconds until the instance must be ready, and a process that is started again; as long
    requests wait for a worker."""
    heartbeat_seconds: Annotated[float, _LIFE, _within(0.05, most=60)] = 0.5
    """Time between two snapshots of a process."""
    hang_seconds: Annotated[float, _LIFE, _ABOVE_ZERO] = 5.0
    """Seconds without a heartbeat after which a process is killed and started anew."""
    stall_seconds: Annotated[float, _LIFE, _ABOVE_ZERO] = 120.0
    """Seconds without a turn of its main loop after which a process is killed and started anew;
    longer than any step of the engine."""

    engine: Annotated[EngineKind, _TESTING] = "auto"
    """fake: no model, a deterministic token sequence instead."""
    fake_step_ms: Annotated[float, _TESTING, _NOT_NEGATIVE] = 0.0
    """Duration of a step of the fake engine."""
    fake_checking: Annotated[bool, _TESTING] = False
    """Each token of the fake engine depends on all before it, as they lie in its pages."""
