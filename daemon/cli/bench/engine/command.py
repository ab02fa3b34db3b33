"""`deepinfer bench engine`: how fast the engine's steps are, beside how fast they could be."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from daemon.cli.bench.engine.shapes import SHAPES, Shape
from daemon.cli.output import table_console
from daemon.configuration.config import DEFAULT_MODEL, InstanceConfig
from daemon.errors import EXIT_USAGE, DeepInferError
from daemon.system.accelerator import detect_accelerator, usable_cores
from workers.settings import Accelerator, DType, EngineSettings, LoadFormat

_DEFAULTS: Final[dict[Accelerator, tuple[str, str, str]]] = {
    "nvidia": ("1,64,256", "1024", "8192"),
    "cpu": ("1,4", "256", "512"),
}
"""Batches, contexts and prompts."""


def read_numbers(text: str) -> tuple[int, ...]:
    """`1,64,256` as numbers.

    Raises:
        ValueError: they are none, or some number is below 1.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{text!r} is no list of numbers such as 1,64,256.")
    return tuple(map(int, words))


def _check_numbers(_type: object, value: str | None) -> None:
    if value is not None:
        read_numbers(value)


_NUMBERS = Parameter(validator=_check_numbers)
_BATCH = "Sequences that decode at once, one or more numbers. Default: {} on a GPU, {} on a CPU."
_CONTEXT = "Tokens that each of them has, one or more numbers. Default: {} on a GPU, {} on a CPU."
_PREFILL = "Tokens of a prompt, one or more numbers. Default: {} on a GPU, {} on a CPU."


def _numbers_help(text: str, option: int) -> Parameter:
    return Parameter(help=text.format(_DEFAULTS["nvidia"][option], _DEFAULTS["cpu"][option]))


def engine(
    *,
    model: Annotated[
        str, Parameter(help=f"As for serve: {DEFAULT_MODEL}, or a directory with a checkpoint.")
    ] = DEFAULT_MODEL,
    shape: Annotated[
        Shape | None,
        Parameter(help="Random weights of this shape in place of --model. 8b: Llama 3.1 8B's."),
    ] = None,
    load_format: Annotated[
        LoadFormat, Parameter(help="dummy: random weights of the model's shape.")
    ] = "auto",
    dtype: Annotated[
        DType, Parameter(help="Type of weights and KV. auto: the checkpoint's; float32 on a CPU.")
    ] = "auto",
    accelerator: Annotated[
        Accelerator | None,
        Parameter(help="Default: nvidia where there is such a device, else cpu."),
    ] = None,
    device: Annotated[
        int, Parameter(validator=Number(gte=0), help="Number of the GPU, from 0.")
    ] = 0,
    batch: Annotated[str | None, _NUMBERS, _numbers_help(_BATCH, 0)] = None,
    context: Annotated[str | None, _NUMBERS, _numbers_help(_CONTEXT, 1)] = None,
    prefill: Annotated[str | None, _NUMBERS, _numbers_help(_PREFILL, 2)] = None,
    json: Annotated[Path, Parameter(help="File for all figures; an older one is replaced.")] = Path(
        "engine.json"
    ),
    plot: Annotated[
        Path | None,
        Parameter(help="PNG file for a plot of them; needs matplotlib (the extra bench)."),
    ] = None,
) -> None:
    """Run decode and prompt steps of a model, alone and greedy, and set them beside the roofline.

    For each batch and context, and each prompt: time, bytes and operations of a step, how fast the device
    could do it (measured in the same run), the share that is reached, and where the time goes by class of
    kernel. A GPU should have nothing else to do.

    Raises:
        DeepInferError: the model cannot be run, or a file cannot be written.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise DeepInferError(
            "--plot needs matplotlib: install the extra bench (pip install 'deepinfer-serve[bench]'), or "
            "leave --plot out.",
            EXIT_USAGE,
        )
    found = accelerator or detect_accelerator()
    texts = (batch, context, prefill)
    batches, contexts, prefills = (
        read_numbers(text or default) for text, default in zip(texts, _DEFAULTS[found], strict=True)
    )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker; before torch is loaded
    # Imported here: other commands do not wait for torch.
    from daemon.cli.bench.engine.measure import Cases, measure_engine  # noqa: PLC0415
    from daemon.cli.bench.engine.report import show  # noqa: PLC0415

    console = table_console()

    def progress(line: str) -> None:
        console.print(line, style="dim", markup=False)

    with _model_directory(model, shape, progress) as directory:
        settings = _settings(
            directory, found, device, dtype, "dummy" if shape is not None else load_format
        )
        name = f"random weights of shape {shape}" if shape is not None else directory.name
        report = measure_engine(settings, name, Cases(batches, contexts, prefills), progress)
    show(report, console)
    with _writing(json):
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    console.print(f"written to {json}")
    if plot is not None:
        from daemon.cli.bench.engine.plot import draw  # noqa: PLC0415  it imports matplotlib

        with _writing(plot):
            plot.write_bytes(draw(report))
        console.print(f"drawn to {plot}")


@contextlib.contextmanager
def _model_directory(
    model: str, shape: Shape | None, progress: Callable[[str], None]
) -> Iterator[Path]:
    if shape is None:
        yield _find_model(model, progress)
        return
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as directory:
        path = Path(directory)
        (path / "config.json").write_bytes(msgspec.json.encode(SHAPES[shape]))
        yield path


def _find_model(model: str, progress: Callable[[str], None]) -> Path:
    path = Path(model).expanduser().absolute()
    if path.is_dir():  # an engine needs no tokenizer, which `serve` asks for
        return path
    # Imported here: it takes long.
    from daemon.instance.preflight import find_model  # noqa: PLC0415

    return find_model(model, progress)


def _settings(
    directory: Path, accelerator: Accelerator, device: int, dtype: DType, load_format: LoadFormat
) -> EngineSettings:
    """As `serve` has them by default."""
    defaults = InstanceConfig()
    return EngineSettings(
        model_dir=str(directory),
        accelerator=accelerator,
        device_index=device,
        num_threads=1 if accelerator == "nvidia" else usable_cores(),
        dtype=dtype,
        load_format=load_format,
        hf_overrides={},
        max_model_len=None,
        max_num_seqs=1,
        max_batched_tokens=1,
        kv_cache_gb=None,
        gpu_memory_utilization=defaults.gpu_memory_utilization,
        kv_dtype=defaults.kv_dtype,
        keep_tokens=defaults.yoco_keep_tokens,
        deterministic=False,
        stores_prefixes=False,
    )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DeepInferError(f"{path} cannot be written: {error.strerror}.") from error
