"""`deepinfer bench page-copy`: how fast pages travel between a GPU and the host prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from daemon.cli.output import table_console
from daemon.errors import EXIT_USAGE, DeepInferError
from daemon.system.accelerator import nvidia_devices


def page_copy(
    *,
    json: Annotated[Path, Parameter(help="File for all figures; an older one is replaced.")] = Path(
        "page-copy.json"
    ),
    device: Annotated[
        int, Parameter(validator=Number(gte=0), help="Number of the GPU, from 0.")
    ] = 0,
) -> None:
    """Copy rows of many sizes and whole prompts, up, down and both ways at once, by each method.

    Beside each other in one run: the batched driver call, the kernel, what --hicache-copy auto chooses,
    one large copy as the yardstick, and what a decode loses while copies run. Takes about a minute, 4 GB
    of host memory and 8 GB of the GPU's, which should have nothing else to do.

    Raises:
        DeepInferError: there is no such GPU, or the file cannot be written.
    """
    if device >= len(nvidia_devices()):
        raise DeepInferError(
            f"There is no GPU {device} on this machine, and page copies are measured on one: run this "
            "where `nvidia-smi -L` lists it.",
            EXIT_USAGE,
        )
    # Imported here: no other command needs torch.
    from daemon.cli.bench.page_copy.gpu import measure_page_copies  # noqa: PLC0415
    from daemon.cli.bench.page_copy.report import show  # noqa: PLC0415

    console = table_console()
    report = measure_page_copies(device, lambda line: console.print(line, style="dim"))
    show(report, console)
    try:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise DeepInferError(
            f"The figures cannot be written to {json}: {error.strerror}."
        ) from error
    console.print(f"written to {json}")
