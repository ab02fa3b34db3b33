"""All runs of a copy in one launch of `csrc/page_copy.cu`: a few blocks move the bytes through the
addresses that page-locked memory has on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hicache.copies.cuda.method import (
    CopyMethodMissing,
    CudaStream,
    RowPair,
    single_rows,
)
from hicache.copies.row_copy import Direction
from hicache.copies.runs import RowRuns
from hicache.errors import HostPoolError
from transport.wording import first_line

BLOCKS: Final[Mapping[Direction, int]] = {"load": 16, "store": 2}
"""As many as it takes to fill PCIe 5 x16, on an H200. Reads are answered after a microsecond or more, so
there have to be many under way; writes are not answered, and more of them only crowd out what the steps
beside them read."""
THREADS: Final = 512
VECTOR_BYTES: Final = 16
MAX_PIECE_BYTES: Final = 1 << 16
"""Eight vectors a thread: pieces are much longer than the bookkeeping around them, and a copy of few
long rows still has a piece for every block."""

PairArray = npt.NDArray[np.int32]


class KernelArguments(NamedTuple):
    """What `copy_rows` takes, in this order, before the address and the number of the pairs."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    row_bytes: int
    piece_bytes: int
    pieces: int


class CopyKernel(Protocol):
    """The compiled kernel on one device."""

    def launch(
        self, arguments: KernelArguments, pairs: PairArray, blocks: int, stream: CudaStream
    ) -> None:
        """Put it into `stream` with so many blocks, for the row pairs int32 [rows,2] (target, source),
        which lie on the host and may change as soon as this returns."""
        ...


def try_copy_kernel(kernel: CopyKernel, scratch: int, stream: CudaStream) -> None:
    """Copy 16 bytes within the device, to find out whether the kernel can be launched.

    Args:
        kernel: on the device.
        scratch: address of 32 bytes on the device that nobody uses, a multiple of 16.
        stream: any.

    Raises:
        CopyMethodMissing: it cannot.
    """
    row = VECTOR_BYTES
    arguments = KernelArguments(scratch + row, row, scratch, row, row, row, pieces=1)
    try:
        kernel.launch(arguments, np.zeros((1, 2), np.int32), 1, stream)
    except Exception as error:  # cuda-core's errors have no public type
        raise CopyMethodMissing(
            f"the copy kernel cannot be launched ({first_line(error)})"
        ) from error


class KernelCopy:
    """`CopyMethod` by the kernel."""

    def __init__(self, rows: RowPair, kernel: CopyKernel) -> None:
        """Args:
        rows: both addresses are the device's.
        kernel: on that device.

        Raises:
            CopyMethodMissing: rows do not consist of whole vectors.
        """
        here, there = ((side.address, side.pitch) for side in (rows.here, rows.there))
        if any(place % VECTOR_BYTES for place in (*here, *there, rows.row_bytes)):
            raise CopyMethodMissing(
                f"rows of {rows.row_bytes} bytes do not consist of {VECTOR_BYTES}-byte vectors"
            )
        self._kernel = kernel
        piece_bytes, pieces = cut_row(rows.row_bytes)
        shape = (rows.row_bytes, piece_bytes, pieces)
        self._arguments: dict[Direction, KernelArguments] = {
            "load": KernelArguments(*here, *there, *shape),
            "store": KernelArguments(*there, *here, *shape),
        }

    def start(self, direction: Direction, runs: RowRuns, stream: CudaStream) -> None:
        here, there, _ = single_rows(runs)
        pair = (here, there) if direction == "load" else (there, here)
        pairs = np.stack(pair, axis=1).astype(np.int32)
        try:
            self._kernel.launch(self._arguments[direction], pairs, BLOCKS[direction], stream)
        except Exception as error:  # cuda-core's errors have no public type
            raise HostPoolError(
                f"CUDA refused to launch the kernel that should {direction} {len(pairs)} rows "
                f"({first_line(error)}): an earlier failure of the GPU shows like this too; see the "
                "log before it, or try --hicache-copy batch."
            ) from error


def cut_row(row_bytes: int) -> tuple[int, int]:
    pieces = -(-row_bytes // MAX_PIECE_BYTES)
    vectors = -(-row_bytes // (pieces * VECTOR_BYTES))
    return vectors * VECTOR_BYTES, pieces
