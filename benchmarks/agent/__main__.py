"""Agents replayed with the prefix cache and without: `python -m benchmarks.agent`.

A trace is made up from a seed: sessions that begin one after the other, each a conversation of several
turns over one shared system prompt, with times to think (a tool that runs) between them. What the
assistant says in the history is the trace's, not the model's, so that both runs send the same prompts;
the model answers with as many tokens as the trace wants. Each session keeps one connection. A small
`--kv-cache-gb` makes the sessions' pages more than the device holds, as with agents it always is.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.agent.trace import TraceSession, TraceShape, make_trace
from benchmarks.servers import ServeOptions, instance, served_options
from daemon.cli.check.api_client import CHAT, ApiClient, RequestFailed
from daemon.cli.check.sample_text import SampleText


class TurnFigures(msgspec.Struct, frozen=True):
    """One answered turn."""

    session: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_seconds: float
    total_seconds: float


class RunFigures(msgspec.Struct, frozen=True):
    """One pass over the trace."""

    hicache_size_gb: float
    seconds: float
    turns: list[TurnFigures]
    errors: list[str]
    preemptions: int

    @property
    def hit_share(self) -> float:
        prompt = sum(turn.prompt_tokens for turn in self.turns)
        return sum(turn.cached_tokens for turn in self.turns) / max(prompt, 1)

    @property
    def tokens_per_second(self) -> float:
        total = sum(turn.prompt_tokens + turn.completion_tokens for turn in self.turns)
        return total / self.seconds

    def ttft(self, percent: int, later: bool = True) -> float:
        """A percentile of the time to first token, in seconds; `later`: without first turns."""
        times = [turn.ttft_seconds for turn in self.turns if turn.turn or not later]
        return percentile(times, percent)


class ReplayFigures(msgspec.Struct, frozen=True):
    """Everything that is reported."""

    model: str
    serve: str
    seed: int
    sessions: int
    off: RunFigures
    on: RunFigures


def percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class Replay:
    """One pass of the trace over one instance, a thread and a connection for each session."""

    def __init__(self, url: str, model: str, system: str, begin: float) -> None:
        self._url, self._model, self._system = url, model, system
        self._begin = begin
        self._lock = threading.Lock()
        self.turns: list[TurnFigures] = []
        self.errors: list[str] = []

    def run(self, number: int, session: TraceSession) -> None:
        """Play one session; a failed turn ends it."""
        messages = [{"role": "system", "content": self._system}]
        with ApiClient(self._url) as client:
            due = self._begin
            for index, turn in enumerate(session.turns):
                due += turn.think_seconds
                time.sleep(max(0.0, due - time.monotonic()))
                messages.append({"role": "user", "content": turn.user})
                body: dict[str, Any] = {
                    "model": self._model, "messages": messages, "max_tokens": turn.output_tokens,
                    "temperature": 0, "ignore_eos": True,
                }  # fmt: skip
                try:
                    answer = client.stream(CHAT, body)
                except RequestFailed as error:
                    with self._lock:
                        self.errors.append(f"session {number}, turn {index}: {error}")
                    return
                due = time.monotonic()
                messages.append({"role": "assistant", "content": turn.assistant})
                with self._lock:
                    self.turns.append(
                        TurnFigures(
                            number, index, answer.prompt_tokens, answer.cached_tokens or 0,
                            answer.completion_tokens, answer.first_token_seconds,
                            answer.total_seconds,
                        )
                    )  # fmt: skip


def replay(
    shape: TraceShape, seed: int, options: dict[str, object], console: Console
) -> RunFigures:
    with console.status("starting") as status, instance(**options) as server:
        url = f"http://127.0.0.1:{server.port}"
        draw = random.Random(seed)
        with ApiClient(url) as client:
            model = client.model().id
            system, sessions = make_trace(shape, SampleText.calibrated(draw, client, model), draw)
        status.update(f"replaying with a host cache of {options['hicache_size_gb']} GiB a rank")
        began = time.monotonic()
        run = Replay(url, model, system, began)
        with ThreadPoolExecutor(len(sessions)) as pool:
            list(pool.map(run.run, range(len(sessions)), sessions))
        seconds = time.monotonic() - began
        with ApiClient(url) as client:
            state = msgspec.json.decode(client.get("/deepinfer/state"), type=_State)
    return RunFigures(
        hicache_size_gb=float(str(options["hicache_size_gb"])), seconds=seconds,
        turns=sorted(run.turns, key=lambda turn: (turn.session, turn.turn)), errors=run.errors,
        preemptions=sum(row.preemptions or 0 for row in state.cache),
    )  # fmt: skip


class _CacheRow(msgspec.Struct):
    preemptions: int | None = None


class _State(msgspec.Struct):
    cache: list[_CacheRow]


def show(figures: ReplayFigures, console: Console) -> None:
    off, on = figures.off, figures.on
    turns = len(off.turns)
    title = f"{figures.model}: {figures.sessions} sessions, {turns} turns, seed {figures.seed}"
    table = Table("", "cache off", "cache on", "ratio", title=title)

    def row(name: str, values: Iterable[float], form: str, better: str = "") -> None:
        without, with_cache = values
        up, down = (with_cache, without) if better == "more" else (without, with_cache)
        ratio = f"{up / down:.2f}" if better and down else ""
        table.add_row(
            name,
            form.format(without),
            form.format(with_cache),
            ratio,
        )

    runs = (off, on)
    row("seconds", (r.seconds for r in runs), "{:.1f}", "less")
    row("tokens/s, prompts and outputs", (r.tokens_per_second for r in runs), "{:,.0f}", "more")
    row("turns/min", (len(r.turns) / r.seconds * 60 for r in runs), "{:.1f}", "more")
    for percent in (50, 90):
        name = f"TTFT p{percent}, turns from the second on, s"
        row(name, (r.ttft(percent) for r in runs), "{:.3f}", "less")
    row("TTFT p50, all turns, s", (r.ttft(50, later=False) for r in runs), "{:.3f}", "less")
    row("TTFT p90, all turns, s", (r.ttft(90, later=False) for r in runs), "{:.3f}", "less")
    row("prompt tokens from the cache", (r.hit_share for r in runs), "{:.1%}")
    row(
        "prompt tokens, mean",
        (statistics.fmean(t.prompt_tokens for t in r.turns) for r in runs),
        "{:,.0f}",
    )
    row("preemptions", (r.preemptions for r in runs), "{:,}")
    row("errors (0)", (len(r.errors) for r in runs), "{}")
    console.print(table)
    _show_turns(figures, console)
    for error in (*off.errors, *on.errors):
        console.print(f"[red]{error}[/]", markup=True)


def _show_turns(figures: ReplayFigures, console: Console) -> None:
    """TTFT as the conversations grow, one bar per turn."""
    table = Table("turn", "prompt tokens", "off, s", "on, s", "", title="TTFT p50 by turn")
    count = max((turn.turn for turn in figures.off.turns), default=-1) + 1
    medians = [
        [
            statistics.median([t.ttft_seconds for t in run.turns if t.turn == number] or [0.0])
            for run in (figures.off, figures.on)
        ]
        for number in range(count)
    ]
    longest = max((value for pair in medians for value in pair), default=0.0) or 1.0
    for number, (off, on) in enumerate(medians):
        lengths = [t.prompt_tokens for t in figures.off.turns if t.turn == number]
        bars = "\n".join(
            f"[{colour}]{'█' * max(1, round(30 * value / longest))}[/]"
            for colour, value in (("red", off), ("green", on))
        )
        table.add_row(
            str(number + 1),
            f"{statistics.fmean(lengths or [0]):,.0f}",
            f"{off:.3f}",
            f"{on:.3f}",
            bars,
        )
    console.print(table)


def main(
    *,
    sessions: int = 8,
    turns: int = 5,
    system_tokens: int = 384,
    first_tokens: int = 256,
    turn_tokens: int = 192,
    output_tokens: int = 16,
    think_seconds: float = 2.0,
    spread_seconds: float = 10.0,
    model: str = "SmolLM2-135M-Instruct",
    kv_cache_gb: float = 0.15,
    hicache_size_gb: float = 0.75,
    serve: ServeOptions = "",
    seed: int = 1,
    json: Path | None = None,
) -> int:
    """Replay. Exit code 1: a request failed.

    Parameters
    ----------
    sessions
        Agents; all are under way at once, once all have begun.
    turns
        Of each.
    system_tokens
        Of the shared system prompt. Lengths are means, about; those below too.
    first_tokens
        Of a session's first message.
    turn_tokens
        Of each further one.
    output_tokens
        Of an answer.
    think_seconds
        Mean time between an answer and the next turn.
    spread_seconds
        Time within which the sessions begin.
    model
        What `deepinfer serve --model` takes.
    kv_cache_gb
        Device pool of a worker, in GB: less than the sessions need.
    hicache_size_gb
        Host pool of a worker, in GiB: more than they need. 0 in the first run.
    serve
        Further options of `deepinfer serve`, in one word: "--dtype float32 --dp 1".
    seed
        Of the trace.
    json
        Write the figures to this file.
    """
    console = Console(highlight=False)
    shape = TraceShape(
        sessions, turns, system_tokens, first_tokens, turn_tokens, output_tokens, think_seconds,
        spread_seconds,
    )  # fmt: skip
    options: dict[str, object] = {
        "engine": "auto", "model": model, "kv_cache_gb": kv_cache_gb, **served_options(serve),
    }  # fmt: skip
    off = replay(shape, seed, {**options, "hicache_size_gb": 0}, console)
    on = replay(shape, seed, {**options, "hicache_size_gb": hicache_size_gb}, console)
    figures = ReplayFigures(Path(model).name, serve, seed, sessions, off, on)
    show(figures, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return 1 if off.errors or on.errors else 0


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
