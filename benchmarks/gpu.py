"""Everything that is claimed about a GPU, in one run: `python -m benchmarks.gpu`, or `make bench-gpu`.

Each part is a command of its own, which can be run alone; its figures go into a file of its own. What fails
or takes too long is said at the end, and the other parts run all the same.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import cyclopts
from rich.console import Console
from rich.table import Table

from benchmarks.tiny_model import make_tokenizer
from daemon.cli.bench.engine.shapes import SHAPES

V41_RELEASED: Final = Path(__file__).parents[1] / "tests" / "data" / "v41_released"
STOP_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Part:
    """One measurement."""

    name: str
    command: tuple[str, ...]
    """What follows `python -m`."""
    figures: Path
    """File that it writes."""


def make_parts(out: Path, models: Path, v41_layers: int, repeats: int) -> list[Part]:
    llama = models / "llama-8b-shaped"
    llama.mkdir()
    make_tokenizer(llama)
    (llama / "config.json").write_text(json.dumps(SHAPES["8b"]))
    cut = json.dumps({"num_hidden_layers": v41_layers})
    return [
        Part(
            "page copies",
            ("daemon.cli.main", "bench", "page-copy", "--json", str(out / "page_copy.json")),
            out / "page_copy.json",
        ),
        _ttft(
            "TTFT, 8B-shaped, 32K + 64",
            out / "ttft_8b.json",
            llama,
            (32768, 64),
            repeats,
            "--load-format dummy --max-num-seqs 8 --max-model-len 40000 --hicache-size-gb 24",
        ),
        _ttft(
            "TTFT, V4.1 dimensions, 64K + 2K",
            out / "ttft_v41.json",
            V41_RELEASED,
            (65536, 2048),
            repeats,
            "--load-format dummy --max-num-seqs 8 --max-model-len 80000 "
            f"--hicache-size-gb 8 --hicache-state-slots 256 --hf-overrides '{cut}'",
        ),
    ]


def _ttft(
    name: str, figures: Path, model: Path, lengths: tuple[int, int], repeats: int, serve: str
) -> Part:
    prefix, new = lengths
    words = ("benchmarks.prefix.ttft", "--model", str(model), "--prefix-tokens", str(prefix))
    more = ("--new-tokens", str(new), "--repeats", str(repeats), "--serve", serve)
    return Part(name, (*words, *more, "--json", str(figures)), figures)


def run_part(part: Part, seconds: float) -> int | None:
    """Exit code of the part; None: it took longer than `seconds` and was stopped."""
    process = subprocess.Popen([sys.executable, "-m", *part.command])
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that it ends the instance that it has started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        return None
    finally:
        process.kill()
        process.wait()


def main(
    *,
    out: Path = Path("gpu-figures"),
    only: Annotated[list[int] | None, cyclopts.Parameter(consume_multiple=True)] = None,
    minutes: float = 8.0,
    v41_layers: int = 16,
    repeats: int = 3,
) -> int:
    """Measure. Exit code 1: a part failed.

    Parameters
    ----------
    out
        Folder for the figures, one JSON file a part.
    only
        Numbers of the parts to run, from 1; default: all.
    minutes
        Longest time of one part.
    v41_layers
        Layers of DeepSeek-V4.1 that fit on the device, with room for steps of 8192 tokens; 16 take 115 GiB.
    repeats
        Of each time to first token.
    """
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    table = Table("part", "ended", "seconds", "figures")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="di-bench-") as models:
        for number, part in enumerate(make_parts(out, Path(models), v41_layers, repeats), 1):
            if only is not None and number not in only:
                continue
            console.rule(part.name)
            began = time.monotonic()
            code = run_part(part, minutes * 60)
            failed += code != 0
            said = "took too long" if code is None else f"exit code {code}"
            ended = "well" if code == 0 else f"[red]{said}[/]"
            seconds = f"{time.monotonic() - began:.0f}"
            table.add_row(f"{number} {part.name}", ended, seconds, str(part.figures))
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
