"""The measurements of `deepinfer bench page-copy`, through the product's own copiers.

Times are the device's, between two events on the engine's stream, so they hold everything that an
engine would wait for. The device is kept busy until the host has issued the work: in service a step
runs meanwhile. What issuing takes is measured beside it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from daemon.cli.bench.page_copy.cases import CopyCase, all_cases, prompts
from daemon.cli.bench.page_copy.report import (
    CopyFigures,
    Rates,
    Report,
    SlowdownFigures,
    judge,
)
from daemon.errors import EXIT_USAGE, DeepInferError
from hicache.copies.copy_choice import CopyChoice
from hicache.copies.cuda.open import open_gpu_row_copier
from hicache.copies.cuda.page_lock import PageLock
from hicache.copies.cuda.row_copy import GpuRowCopier
from hicache.copies.cuda.rows import GpuRows, tensor_rows
from hicache.copies.row_copy import LINK_DIRECTION, Direction
from hicache.errors import HostPoolError
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment
from workers.hardware.host_memory import available_host_memory

CHOICES: Final[tuple[CopyChoice, ...]] = ("batch", "kernel", "auto")
REPEATS: Final = 15
BUSY_CYCLES: Final = 60_000_000
"""Some thirty milliseconds: longer than issuing the copies takes."""
LARGE_BYTES: Final = 512 << 20

DECODE_LAYERS: Final = 32
DECODE_WIDTH: Final = 8192
DECODE_ROWS: Final = 64
DECODE_STEPS: Final = 96
STEPS_A_BURST: Final = 4
DECODE_ROUNDS: Final = 3
WANTED_DUTY: Final = 0.5

Progress = Callable[[str], None]


def measure_page_copies(index: int, progress: Progress) -> Report:
    """Measure everything on GPU `index`.

    Raises:
        DeepInferError: PyTorch cannot use the GPU, or memory is short.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeepInferError(
            f"PyTorch {torch.__version__} finds no usable GPU {index}: install a build with CUDA, and "
            "look at what nvidia-smi says.",
            EXIT_USAGE,
        )
    torch.cuda.set_device(index)
    try:
        return _measure_all(torch.device("cuda", index), progress)
    except (HostPoolError, torch.OutOfMemoryError) as error:
        raise DeepInferError(f"The page copies cannot be measured: {error}") from error


def _measure_all(device: torch.device, progress: Progress) -> Report:
    progress("one large copy")
    link = _measure_link(device)
    copies: list[CopyFigures] = []
    missing: list[str] = []
    for case in all_cases():
        progress(case.name)
        with _copiers(case, device, missing) as copiers:
            copies += [_measure_copies(case, choice, copiers[choice]) for choice in copiers]
    slowdowns: list[SlowdownFigures] = []
    decode = DecodeLoad(device)
    for case in prompts():
        progress(f"{case.name}, beside a decode")
        with _copiers(case, device, missing) as copiers:
            slowdowns += _measure_slowdowns(case, copiers, decode)
    return Report(
        torch.cuda.get_device_name(device),
        str(torch.__version__),
        link,
        copies,
        slowdowns,
        list(dict.fromkeys(missing)),
        judge(copies, slowdowns),
    )


@contextlib.contextmanager
def _copiers(
    case: CopyCase, device: torch.device, missing: list[str]
) -> Iterator[dict[CopyChoice, GpuRowCopier]]:
    """Pools for `case`, as a worker has them, and a copier for each method that there is."""
    fd = create_segment("deepinfer-bench")
    try:
        geometry = PoolGeometry("bench", case.row_bytes, case.host_rows)
        pool = HostPool(fd, geometry, available_host_memory())
        lock = PageLock(pool.memory)
        here = tensor_rows(
            torch.zeros(case.device_rows, case.row_bytes, dtype=torch.uint8, device=device)
        )
        assert isinstance(here, GpuRows)
        there = pool.pages.page_locked()
        copiers: dict[CopyChoice, GpuRowCopier] = {}
        for choice in CHOICES:
            try:
                copiers[choice] = open_gpu_row_copier(here, there, choice)
            except HostPoolError as error:
                missing.append(str(error))
        try:
            yield copiers
        finally:
            torch.cuda.synchronize(device)
            copiers.clear()
            del there
            lock.close()
            pool.close()
    finally:
        os.close(fd)


def _measure_copies(case: CopyCase, choice: CopyChoice, copier: GpuRowCopier) -> CopyFigures:
    def load() -> None:
        copier.load(*case.load)

    def store() -> None:
        copier.store(*case.store)
        copier.before_overwrite(case.store.here)

    def both() -> None:
        # The store first: a load makes the engine's stream, and so a later store, wait for it.
        copier.store(*case.store)
        copier.load(*case.load)
        copier.before_overwrite(case.store.here)

    num_bytes = len(case.load.here) * case.row_bytes
    loads, stores, boths = _time(load), _time(store), _time(both)
    return CopyFigures(
        case=case.name,
        method=choice,
        row_bytes=case.row_bytes,
        mean_run_bytes=case.mean_run_bytes(),
        gb_per_second=Rates(
            num_bytes / loads.seconds / 1e9,
            num_bytes / stores.seconds / 1e9,
            2 * num_bytes / boths.seconds / 1e9,
        ),
        issue_ms=loads.issue_seconds * 1e3,
        load_ms=_time_alone(load) * 1e3,
    )


def _measure_link(device: torch.device) -> Rates:
    host = [torch.zeros(LARGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    rows = [torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up() -> None:
        rows[0].copy_(host[0], non_blocking=True)

    def down() -> None:
        host[1].copy_(rows[1], non_blocking=True)

    def both() -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        up()
        with torch.cuda.stream(side):
            down()
        current.wait_stream(side)

    return Rates(
        LARGE_BYTES / _time(up).seconds / 1e9,
        LARGE_BYTES / _time(down).seconds / 1e9,
        2 * LARGE_BYTES / _time(both).seconds / 1e9,
    )


@dataclass(frozen=True)
class Timing:
    """Medians."""

    seconds: float
    """On the device."""
    issue_seconds: float
    """On the host."""


def _time(start: Callable[[], None]) -> Timing:
    seconds: list[float] = []
    issued: list[float] = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        begin = _mark()
        started = time.perf_counter()
        start()
        issued.append(time.perf_counter() - started)
        end = _mark()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    # The first run fills allocators and loads kernels.
    return Timing(statistics.median(seconds[1:]), statistics.median(issued[1:]))


def _time_alone(start: Callable[[], None]) -> float:
    """Median of the seconds on the host from the call until all is done, on an idle device."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        start()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class DecodeLoad:
    """A CUDA graph that does what a decode step mostly does: read weights, for a few rows."""

    def __init__(self, device: torch.device) -> None:
        def random(rows: int) -> torch.Tensor:
            return torch.randn(rows, DECODE_WIDTH, device=device, dtype=torch.bfloat16)

        self._weights = [random(DECODE_WIDTH) for _ in range(DECODE_LAYERS)]
        self._input = random(DECODE_ROWS)
        # Not anew for each burst: torch hands out 32 streams in turn, and a copier's would soon be one of
        # those that a decode beside it uses, and its copies wait for the steps that they should run beside.
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            self._run()
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._output = self._run()

    def _run(self) -> torch.Tensor:
        output = self._input
        for weight in self._weights:
            output = self._input @ weight
        return output

    def step_seconds(self, burst: Callable[[], None] | None = None) -> float:
        """Mean time of a step; `burst` is called on another stream at every fourth one."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            begin = _mark()
        for step in range(DECODE_STEPS):
            if burst is not None and step % STEPS_A_BURST == 0:
                self._side.wait_stream(self.stream)  # not all bursts at once
                with torch.cuda.stream(self._side):
                    burst()
            with torch.cuda.stream(self.stream):
                self._graph.replay()
        with torch.cuda.stream(self.stream):
            end = _mark()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / DECODE_STEPS


def _measure_slowdowns(
    case: CopyCase, copiers: dict[CopyChoice, GpuRowCopier], decode: DecodeLoad
) -> list[SlowdownFigures]:
    return [
        _measure_slowdown(case, choice, direction, copier, decode)
        for choice, copier in copiers.items()
        for direction in LINK_DIRECTION
    ]


def _measure_slowdown(
    case: CopyCase,
    choice: CopyChoice,
    direction: Direction,
    copier: GpuRowCopier,
    decode: DecodeLoad,
) -> SlowdownFigures:
    def copy() -> None:
        if direction == "load":
            copier.load(*case.load)
        else:
            copier.store(*case.store)
            copier.before_overwrite(case.store.here)

    copy_seconds = _time(copy).seconds
    decode.step_seconds()
    alone = decode.step_seconds()
    copies = max(1, round(STEPS_A_BURST * alone * WANTED_DUTY / copy_seconds))

    def burst() -> None:
        for _ in range(copies):
            copy()

    rounds: list[tuple[float, float]] = []
    for _ in range(DECODE_ROUNDS):
        beside, after = decode.step_seconds(burst), decode.step_seconds()
        rounds.append((beside, beside / ((alone + after) / 2)))
        alone = after
    return SlowdownFigures(
        case=case.name,
        method=choice,
        direction=LINK_DIRECTION[direction],
        slowdown_percent=(statistics.median(slower for _, slower in rounds) - 1) * 100,
        duty_percent=copies * copy_seconds / (STEPS_A_BURST * rounds[-1][0]) * 100,
    )
