"""The table of one Engram layer, left in its file and mapped into memory.

A table of the released model has 101 GB. Processes of one host map the same file, so its pages are in
memory once, in the page cache, whatever the number of ranks.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import warnings
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.contract import ModelLoadError
from workers.models.deepseek_v41.weights.formats import dequantize_rows
from workers.models.deepseek_v41.weights.tensor_table import scale_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.weights.checkpoint import Checkpoint
    from workers.models.safetensors_header import StoredTensor

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PREFETCH_QUEUE: Final = 8


class EngramTable(Protocol):
    def lookup(
        self,
        row_ids: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return the rows of each token, joined.

        Args:
            row_ids: int64 `[T, rows]`, on any device.
            device: device of the result; None: that of `row_ids`.

        Returns:
            `dtype` `[T, rows * head_dim]`.
        """
        ...

    def prefetch(self, row_ids: torch.Tensor) -> None: ...

    def close(self) -> None: ...


def open_engram_table(checkpoint: Checkpoint, layer: int) -> MappedEngramTable:
    return MappedEngramTable(*stored_tensors(checkpoint, [layer]))


def stored_tensors(checkpoint: Checkpoint, layers: Sequence[int]) -> list[StoredTensor]:
    found = []
    for layer in layers:
        name = f"layers.{layer}.engram.embed.weight"
        found.append(checkpoint.tensors[name])
        if scale_name(name) in checkpoint.tensors:
            found.append(checkpoint.tensors[scale_name(name)])
    return found


class MappedEngramTable:
    """An `EngramTable` in a safetensors file: FP8 rows with scales, or rows of plain floats.

    `lookup` waits for the disk if a row is not in the page cache yet; `EngramWarmup` reads rows ahead.
    Only one thread at a time may use it.
    """

    def __init__(self, rows: StoredTensor, scales: StoredTensor | None = None) -> None:
        self._float_dtype = None if scales is not None else _FLOATS[rows.dtype]
        self._parts = [_MappedRows(part) for part in (rows, scales) if part is not None]
        self._prefetcher: _Prefetcher | None = None

    def lookup(
        self,
        row_ids: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        target = row_ids.device if device is None else device
        ids = row_ids.reshape(-1).to("cpu", torch.int64)
        gathered = [part.gather(ids, target) for part in self._parts]
        if self._float_dtype is None:
            values = dequantize_rows(gathered[0], gathered[1], dtype)
        else:
            values = gathered[0].view(self._float_dtype).to(dtype)
        tokens, rows = row_ids.shape
        return values.view(tokens, rows * values.shape[-1])

    def prefetch(self, row_ids: torch.Tensor) -> None:
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._parts)
        self._prefetcher.hint(row_ids.reshape(-1).to("cpu", torch.int64).numpy())

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        for part in self._parts:
            part.close()
        self._parts = []


class _MappedRows:
    """Maps the rows of one tensor read-only, as bytes."""

    def __init__(self, stored: StoredTensor) -> None:
        self._file = stored.file
        self._offset = stored.offset
        self.size = stored.size
        self.row_bytes = stored.size // stored.shape[0]
        # A mapping starts at a page; the tensor need not.
        lead = stored.offset % mmap.ALLOCATIONGRANULARITY
        try:
            self._fd = os.open(stored.file, os.O_RDONLY)
            mapping = mmap.mmap(
                self._fd, lead + stored.size, access=mmap.ACCESS_READ, offset=stored.offset - lead
            )
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"{stored.key} in {stored.file} cannot be mapped into memory: {error}."
            ) from error
        # Rows are read in random order: what the kernel would read around them is wasted.
        mapping.madvise(mmap.MADV_RANDOM)
        with warnings.catch_warnings():
            # torch has no read-only tensors; this one is only read.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=stored.size, offset=lead)
        self._rows: torch.Tensor | None = flat.view(stored.shape[0], self.row_bytes)

    def gather(self, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self._rows is None:
            raise ValueError("the table is closed")
        staging = torch.empty(
            len(ids), self.row_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        torch.index_select(self._rows, 0, ids, out=staging)
        return staging.to(device, non_blocking=True)

    def read_ahead(self, ids: npt.NDArray[np.int64], cancelled: threading.Event) -> None:
        first = self._offset + ids * self.row_bytes
        pages = np.unique(np.concatenate([first, first + self.row_bytes - 1]) // mmap.PAGESIZE)
        if not len(pages):
            return
        breaks = np.flatnonzero(np.diff(pages) > 1) + 1
        first_pages = pages[np.r_[0, breaks]] * mmap.PAGESIZE
        ends = (pages[np.r_[breaks, len(pages)] - 1] + 1) * mmap.PAGESIZE
        for begin, end in zip(first_pages.tolist(), ends.tolist(), strict=True):
            if cancelled.is_set():
                return
            # Unlike madvise, this lets other Python threads run.
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._rows = None
        os.close(self._fd)


class _Prefetcher:
    """A thread that works through a short queue of hints."""

    def __init__(self, parts: list[_MappedRows]) -> None:
        self._parts = parts
        self._hints: queue.Queue[npt.NDArray[np.int64] | None] = queue.Queue(_PREFETCH_QUEUE)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engram-prefetch", daemon=True)
        self._thread.start()

    def hint(self, ids: npt.NDArray[np.int64]) -> None:
        try:
            self._hints.put_nowait(ids)
        except queue.Full:
            # A late hint is worthless: the look-up itself reads the rows.
            return

    def close(self) -> None:
        self._closing.set()
        while True:
            try:
                self._hints.put_nowait(None)
                break
            except queue.Full:
                self._drop_one()
        self._thread.join()

    def _drop_one(self) -> None:
        try:
            self._hints.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        while (ids := self._hints.get()) is not None:
            for part in self._parts:
                part.read_ahead(ids, self._closing)


class DummyEngramTable:
    """An `EngramTable` whose rows follow from their ids. It needs no memory and has any number of rows."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self._channels = config.engram_head_dim
        self._layer = layer

    def lookup(
        self,
        row_ids: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        ids = row_ids.to(row_ids.device if device is None else device, torch.int64)
        channels = torch.arange(self._channels, device=ids.device)
        # Multiply and fold, twice; int64 products wrap around.
        mixed = (ids.unsqueeze(-1) * self._channels + channels) * -7046029254386353131 + self._layer
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        spread = ((mixed ^ (mixed >> 32)) & 0xFFFF).to(torch.float32) / 0x8000 - 1
        return (spread * 3**0.5).to(dtype).flatten(1)

    def prefetch(self, row_ids: torch.Tensor) -> None: ...

    def close(self) -> None: ...
