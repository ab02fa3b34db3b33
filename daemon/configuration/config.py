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
from workers.settings import Accelerator, DType, EngineKind, KVDType, LoadFormat

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"
INSTANCE_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

LogLevel = Literal["debug", "info", "warning", "error"]

_MODEL = Group("Model", sort_key=1)
_INSTANCE = Group("Instance and processes", sort_key=2)
_ENGINE = Group("Engine", sort_key=3)
_CACHE = Group("Prefix cache", sort_key=3.5)
_HTTP = Group("HTTP", sort_key=4)
_ADMISSION = Group("Admission and routing", sort_key=5)
_LIFE = Group("Life and death", sort_key=6)
_TESTING = Group("For tests and pipeline benchmarks", sort_key=7)


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


_POSITIVE: Final = Number(gte=1)
_SECONDS: Final = Number(gt=0)

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
    """All options of an instance. None means: found out at start (the help says how)."""

    model: Annotated[
        str,
        Parameter(
            group=_MODEL,
            help=f"{DEFAULT_MODEL} (fetched once) or a directory with a Hugging Face checkpoint; "
            "$DEEPINFER_HF_MODEL_DIR names it too.",
        ),
    ] = DEFAULT_MODEL
    served_model_name: Annotated[
        str | None,
        Parameter(group=_MODEL, help="Model id in the API. Default: the model's own name."),
    ] = None
    dtype: Annotated[
        DType,
        Parameter(
            group=_MODEL, help="Type of weights and KV. auto: the checkpoint's; float32 on a CPU."
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Parameter(group=_MODEL, help="dummy: random weights of the real shape, for benchmarks."),
    ] = "auto"
    hf_overrides: Annotated[
        str,
        Parameter(
            group=_MODEL,
            validator=_check_overrides,
            help="JSON object (in a TOML file a table will do) with entries of config.json to replace "
            "(nested ones are merged), with --load-format dummy for experiments with shapes. Fewer "
            "num_hidden_layers cut DeepSeek-V4.1 to the first layers of its two halves.",
        ),
    ] = ""
    max_model_len: Annotated[
        int | None,
        Parameter(
            group=_MODEL,
            validator=_POSITIVE,
            help="Prompt plus output, in tokens. Default: the model's.",
        ),
    ] = None

    instance: Annotated[InstanceName, Parameter(group=_INSTANCE)] = "default"
    run_dir: Annotated[RunDir, Parameter(group=_INSTANCE)] = None
    config: Annotated[ConfigFile, Parameter(group=_INSTANCE)] = None
    dp: Annotated[
        int,
        Parameter(
            group=_INSTANCE,
            validator=Number(gte=1, lte=1024),
            help="Engine workers, each with a copy of the model: one a GPU, or a share of the cores.",
        ),
    ] = 1
    frontends: Annotated[
        int,
        Parameter(
            group=_INSTANCE,
            validator=Number(gte=1, lte=256),
            help="HTTP processes sharing the port.",
        ),
    ] = 1
    tokenizers: Annotated[
        int,
        Parameter(group=_INSTANCE, validator=Number(gte=1, lte=256), help="Tokenizer processes."),
    ] = 1
    log_level: Annotated[
        LogLevel, Parameter(group=_INSTANCE, help="Least severe level logged.")
    ] = "info"

    accelerator: Annotated[
        Accelerator | None,
        Parameter(group=_ENGINE, help="Default: nvidia where there is such a device, else cpu."),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Parameter(
            group=_ENGINE,
            validator=_POSITIVE,
            help="Sequences that run at once, per worker. Default: 32 on a CPU, 256 on a GPU.",
        ),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        Parameter(
            group=_ENGINE,
            validator=_POSITIVE,
            help="Prompt tokens per prompt step. Default: 512 on a CPU, 8192 on a GPU.",
        ),
    ] = None
    kv_cache_gb: Annotated[
        float | None,
        Parameter(
            group=_ENGINE,
            validator=_SECONDS,
            help="Size of a worker's page pool, in GB. Default: planned from the free memory.",
        ),
    ] = None
    kv_dtype: Annotated[
        KVDType,
        Parameter(
            group=_ENGINE,
            help="Type of the KV cache. compact (DeepSeek-V4.1): FP4 main KV and index keys, FP8 "
            "windows. auto: compact where the checkpoint is quantised so, else as --dtype.",
        ),
    ] = "auto"
    yoco_keep_tokens: Annotated[
        int,
        Parameter(
            group=_ENGINE,
            validator=Number(gte=0),
            help="DeepSeek-V4.1: the last tokens of a prompt that the decoder layers run on "
            "(bounded replay). 0: all of them, which is refused unless --hicache-size-gb is 0 too.",
        ),
    ] = 140
    deterministic: Annotated[
        bool,
        Parameter(
            group=_ENGINE,
            help="Make the output of a request independent, bit by bit, of what else runs; slower. On a "
            "GPU for DeepSeek-V4.1 only.",
        ),
    ] = False
    gpu_memory_utilization: Annotated[
        float,
        Parameter(
            group=_ENGINE,
            validator=Number(gt=0, lte=1),
            help="Share of a GPU's memory to use where --kv-cache-gb is not given.",
        ),
    ] = 0.9
    hicache_size_gb: Annotated[
        float | None,
        Parameter(
            group=_CACHE,
            validator=Number(gte=0),
            help="Host memory for the pages of each worker's prefix cache, in GiB; 0: no prefix "
            "cache. Default: 32 on a GPU, 0.5 on a CPU, less where memory is short.",
        ),
    ] = None
    hicache_state_slots: Annotated[
        int | None,
        Parameter(
            group=_CACHE,
            validator=_POSITIVE,
            help="Sliding-window states that each worker's prefix cache keeps beside its pages, for "
            "models that need them. Default: 4096 on a GPU, 256 on a CPU.",
        ),
    ] = None
    hicache_copy: Annotated[
        CopyChoice,
        Parameter(
            group=_CACHE,
            help="How pages travel between a GPU and its prefix cache. batch: the GPU's copy engines, all "
            "runs of pages in one call; kernel: a few of its processors; auto: by the length of the runs.",
        ),
    ] = "auto"
    prefill_any_interval: Annotated[
        int,
        Parameter(
            group=_ENGINE,
            validator=_POSITIVE,
            help="Decode steps between two prompt steps while something decodes.",
        ),
    ] = 1

    host: Annotated[
        str,
        Parameter(group=_HTTP, help="Address to listen on; :: and 0.0.0.0 mean every interface."),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Parameter(
            group=_HTTP,
            validator=Number(gte=0, lte=65535),
            help="Port to listen on; 0: any free one.",
        ),
    ] = 8888
    api_keys_file: Annotated[
        Path | None,
        Parameter(group=_HTTP, help="File with one API key a line. Default: no authentication."),
    ] = None
    max_body_mb: Annotated[
        float, Parameter(group=_HTTP, validator=_SECONDS, help="Largest request body, in MB.")
    ] = 32.0
    max_header_kib: Annotated[
        int, Parameter(group=_HTTP, validator=_POSITIVE, help="Largest request header, in KiB.")
    ] = 64
    body_seconds: Annotated[
        float,
        Parameter(
            group=_HTTP, validator=_SECONDS, help="Time within which a request body must arrive."
        ),
    ] = 60.0
    keep_alive_seconds: Annotated[
        int,
        Parameter(
            group=_HTTP,
            validator=_POSITIVE,
            help="How long an idle connection stays open; keep it above the clients' own limit.",
        ),
    ] = 900
    max_choices: Annotated[
        int, Parameter(group=_HTTP, validator=_POSITIVE, help="Largest n of a request.")
    ] = 16
    stream_high_water_kib: Annotated[
        int,
        Parameter(
            group=_HTTP,
            validator=_POSITIVE,
            help="Unread KiB of a stream past which its sequence is paused.",
        ),
    ] = 256
    slow_reader_seconds: Annotated[
        float,
        Parameter(
            group=_HTTP, validator=_SECONDS, help="How long a paused stream may stay unread."
        ),
    ] = 60.0

    max_waiting: Annotated[
        int,
        Parameter(
            group=_ADMISSION,
            validator=Number(gte=0),
            help="HTTP requests that may wait for a worker; one more is answered 429.",
        ),
    ] = 256
    retry_after: Annotated[
        int,
        Parameter(
            group=_ADMISSION, validator=_POSITIVE, help="Seconds in Retry-After of a 429 or 503."
        ),
    ] = 1
    routing: Annotated[
        Routing,
        Parameter(group=_ADMISSION, help="affinity: a conversation stays with its worker."),
    ] = "affinity"
    max_migrations: Annotated[
        int,
        Parameter(
            group=_ADMISSION,
            validator=Number(gte=0),
            help="How often a request may move to another worker after a loss.",
        ),
    ] = 3
    stage_timeout: Annotated[
        float,
        Parameter(
            group=_ADMISSION,
            validator=_SECONDS,
            help="Seconds that a request may spend at a tokenizer, or wait for a worker whose processes "
            "keep dying before they serve (for one that loads: --start-timeout).",
        ),
    ] = 60.0

    drain_timeout: Annotated[
        float,
        Parameter(
            group=_LIFE,
            validator=Number(gte=0),
            help="Seconds that running requests get to end when the instance stops.",
        ),
    ] = 30.0
    start_timeout: Annotated[
        float,
        Parameter(
            group=_LIFE,
            validator=_SECONDS,
            help="Seconds until the instance must be ready, and a process that is started again; as long "
            "requests wait for a worker.",
        ),
    ] = 1800.0
    heartbeat_seconds: Annotated[
        float,
        Parameter(
            group=_LIFE,
            validator=Number(gte=0.05, lte=60),
            help="Time between two snapshots of a process.",
        ),
    ] = 0.5
    hang_seconds: Annotated[
        float,
        Parameter(
            group=_LIFE,
            validator=_SECONDS,
            help="Seconds without a heartbeat after which a process is killed and started anew.",
        ),
    ] = 5.0
    stall_seconds: Annotated[
        float,
        Parameter(
            group=_LIFE,
            validator=_SECONDS,
            help="Seconds without a turn of its main loop after which a process is killed and "
            "started anew; longer than any step of the engine.",
        ),
    ] = 120.0

    engine: Annotated[
        EngineKind,
        Parameter(group=_TESTING, help="fake: no model, a deterministic token sequence instead."),
    ] = "auto"
    fake_step_ms: Annotated[
        float,
        Parameter(
            group=_TESTING, validator=Number(gte=0), help="Duration of a step of the fake engine."
        ),
    ] = 0.0
