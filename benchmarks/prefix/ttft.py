"""Time to the first token after a hit and without one, in one run: `python -m benchmarks.prefix.ttft`.

Each repeat takes a new cache salt: the prefix alone is sent, so that it is stored, then the prefix with new
tokens behind it (the hit). The same prompt under another new salt is the cold one. Greedy, one token.
"""

from __future__ import annotations

import os
import random
import secrets
import statistics
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.servers import Served, ServeOptions, instance, served_options
from daemon.cli.check.api_client import COMPLETIONS, ApiClient, StreamedAnswer

TOKENS: Final = range(10, 250)
"""Ids that any model has."""


class Repeat(msgspec.Struct, frozen=True):
    """Seconds to the first token."""

    cold_seconds: float
    hit_seconds: float
    cached_tokens: int
    """Prompt tokens that the hit took from the cache."""
    equal: bool
    """Whether both gave the same token."""


class TtftFigures(msgspec.Struct, frozen=True):
    """Everything that is reported."""

    model: str
    serve: str
    """Options of the instance."""
    prefix_tokens: int
    new_tokens: int
    repeats: list[Repeat]
    cold_median: float
    hit_median: float
    ratio: float
    """Cold over hit, of the medians."""
    load_average: float


def measure(client: ApiClient, prefix_tokens: int, new_tokens: int, draw: random.Random) -> Repeat:
    prefix = draw.choices(TOKENS, k=prefix_tokens)
    prompt = prefix + draw.choices(TOKENS, k=new_tokens)
    salt = secrets.token_hex(8)
    ask(client, prefix, salt)
    # A store is begun with the last chunk; it has arrived when a short prompt has passed behind it.
    ask(client, prompt[:2], salt)
    hit = ask(client, prompt, salt)
    cold = ask(client, prompt, secrets.token_hex(8))
    if cold.cached_tokens:
        raise RuntimeError(
            f"{cold.cached_tokens} tokens were cached under a salt never used before"
        )
    return Repeat(
        cold.first_token_seconds,
        hit.first_token_seconds,
        hit.cached_tokens or 0,
        hit.result() == cold.result(),
    )


def ask(client: ApiClient, prompt: list[int], salt: str) -> StreamedAnswer:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return client.stream(COMPLETIONS, body | {"cache_salt": salt})


def show(figures: TtftFigures, console: Console) -> None:
    title = f"{figures.model}: {figures.prefix_tokens:,} tokens + {figures.new_tokens:,} new"
    table = Table("", "cold, s", "hit, s", "cold / hit", "cached tokens", "token", title=title)
    for number, repeat in enumerate(figures.repeats, 1):
        table.add_row(
            str(number),
            f"{repeat.cold_seconds:.3f}",
            f"{repeat.hit_seconds:.3f}",
            f"{repeat.cold_seconds / repeat.hit_seconds:.1f}",
            f"{repeat.cached_tokens:,}",
            "equal" if repeat.equal else "[red]different[/]",
        )
    table.add_section()
    table.add_row(
        "median",
        f"{figures.cold_median:.3f}",
        f"{figures.hit_median:.3f}",
        f"[bold]{figures.ratio:.1f}[/]",
    )
    console.print(table)
    console.print(f"load average {figures.load_average:.1f}")


def main(
    *,
    prefix_tokens: int = 4096,
    new_tokens: int = 64,
    repeats: int = 3,
    model: str = "SmolLM2-135M-Instruct",
    serve: ServeOptions = "",
    url: str | None = None,
    seed: int = 1,
    json: Path | None = None,
) -> int:
    """Measure. Exit code 1: a prefix was not hit.

    Parameters
    ----------
    prefix_tokens
        Of the cached beginning.
    new_tokens
        Behind it.
    repeats
        How often, each time with other tokens.
    model
        What `deepinfer serve --model` takes.
    serve
        Further options of `deepinfer serve`, in one word: "--dtype float32 --dp 1".
    url
        Measure this server and start none.
    seed
        Of the tokens.
    json
        Write the figures to this file.
    """
    console = Console(highlight=False)
    options: Mapping[str, object] = {"engine": "auto", "model": model, **served_options(serve)}
    with (
        console.status("starting") as status,
        instance(**options) if url is None else nullcontext() as server,
        ApiClient(url or _url(server)) as client,
    ):
        draw = random.Random(seed)
        status.update("warming up")
        measure(client, min(prefix_tokens, 512), new_tokens, draw)
        done = []
        for number in range(repeats):
            status.update(f"repeat {number + 1} of {repeats}")
            repeat = measure(client, prefix_tokens, new_tokens, draw)
            done.append(repeat)
            # Said at once: what is stopped for taking too long has told this much.
            console.print(
                f"repeat {number + 1}: cold {repeat.cold_seconds:.3f} s, hit {repeat.hit_seconds:.3f} s"
            )
    cold = statistics.median(repeat.cold_seconds for repeat in done)
    hit = statistics.median(repeat.hit_seconds for repeat in done)
    figures = TtftFigures(
        model=Path(model).name if url is None else url, serve=serve, prefix_tokens=prefix_tokens,
        new_tokens=new_tokens, repeats=done, cold_median=cold, hit_median=hit, ratio=cold / hit,
        load_average=os.getloadavg()[0],
    )  # fmt: skip
    show(figures, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return 0 if all(repeat.cached_tokens for repeat in done) else 1


def _url(server: Served | None) -> str:
    assert server is not None
    return f"http://127.0.0.1:{server.port}"


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
