"""All runs of a copy in one driver call, `cudaMemcpyBatchAsync` (CUDA 12.8): the copy engines move the
bytes and the SMs stay free."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from hicache.copies.cuda.method import (
    CopyMethodMissing,
    CudaStream,
    RowPair,
    address_runs,
    import_package,
)
from hicache.copies.row_copy import Direction
from hicache.copies.runs import RowRuns
from hicache.errors import HostPoolError
from transport.wording import first_line

BatchCall = Callable[[list[int], list[int], list[int], int], str]
"""(target addresses, source addresses, sizes in bytes, handle of the stream) -> name of the error, ""
for none."""


def find_batch_call() -> BatchCall:
    return bind_batch_call(import_package("cuda.bindings.runtime", "cuda-bindings"))


def bind_batch_call(runtime: ModuleType) -> BatchCall:
    """The call as a function of what differs from copy to copy.

    Args:
        runtime: `cuda.bindings.runtime`.

    Raises:
        CopyMethodMissing: it knows no such call.
    """
    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        raise CopyMethodMissing("cuda-bindings is older than CUDA 12.8")
    attributes = runtime.cudaMemcpyAttributes()
    # The source is read when the stream gets there: not before the step that writes it has run.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

    def call(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> str:
        # The attributes at [0] hold for all copies from number 0 on. CUDA 12 also returns the index of
        # the copy that failed.
        status, *_ = runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(sizes), [attributes], [0], 1, stream
        )
        return "" if int(status) == 0 else str(getattr(status, "name", int(status)))

    return call


def try_batch_call(call: BatchCall, scratch: int, stream: CudaStream) -> None:
    """Copy 16 bytes within the device, to find out whether the driver knows the call.

    Args:
        call: from `find_batch_call`.
        scratch: address of 32 bytes on the device that nobody uses.
        stream: not the legacy default stream, which the call does not take.

    Raises:
        CopyMethodMissing: it does not.
    """
    try:
        refusal = call([scratch + 16], [scratch], [16], stream.cuda_stream)
    except Exception as error:  # the bindings do not take these arguments, or find no driver
        raise CopyMethodMissing(
            f"cuda-bindings cannot call cudaMemcpyBatchAsync ({first_line(error)})"
        ) from error
    if refusal:
        raise CopyMethodMissing(f"the driver refuses cudaMemcpyBatchAsync ({refusal})")


class BatchCopy:
    """`CopyMethod` by the batched call."""

    def __init__(self, rows: RowPair, call: BatchCall) -> None:
        self._rows = rows
        self._call = call

    def start(self, direction: Direction, runs: RowRuns, stream: CudaStream) -> None:
        target, source, num_bytes = address_runs(self._rows, direction, runs)
        refusal = self._call(
            target.tolist(), source.tolist(), num_bytes.tolist(), stream.cuda_stream
        )
        if refusal:
            raise HostPoolError(
                f"CUDA refused to {direction} {len(target)} runs of {int(num_bytes.sum())} bytes in all "
                f"({refusal}): an earlier failure of the GPU shows like this too; see the log before it, "
                "or try --hicache-copy kernel."
            )
