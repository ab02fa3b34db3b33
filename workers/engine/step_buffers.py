"""Static device memory for what the host knows of a step, filled by one copy a step."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.attention.batch import IntArray

_ALIGNMENT: Final = 32
"""Each array starts at a multiple of this many words (128 bytes)."""
_WORDS_PER_TOKEN: Final = 24
_WORDS_PER_SEQUENCE: Final = 96


class HostWords(NamedTuple):
    """One piece of host memory, seen both as a tensor and as an array."""

    tensor: Tensor
    array: IntArray


def host_words(count: int, *, page_locked: bool) -> HostWords:
    tensor = torch.from_numpy(np.zeros(count, np.int32))
    if page_locked:
        tensor = tensor.pin_memory()
    return HostWords(tensor, tensor.numpy())


class StepBuffers:
    """Implements `StepUpload`.

    Arrays lie one after the other in the order in which they are put. Steps that put arrays of the same sizes
    find them at the same addresses, so a graph can replay over them.

    On a GPU the arrays are gathered in page-locked memory, which later steps must not overwrite while it is
    read. There is one mirror for each step that may be under way, so whoever limits those steps also keeps a
    mirror from being reused early. On a CPU the mirror is the buffer.
    """

    def __init__(
        self,
        device: torch.device,
        depth: int,
        max_batched_tokens: int,
        max_num_seqs: int,
        max_pages: int,
    ) -> None:
        sequences = min(max_num_seqs, max_batched_tokens)
        words = (
            _WORDS_PER_TOKEN * max(max_batched_tokens, max_num_seqs)
            + _WORDS_PER_SEQUENCE * max_num_seqs
            + sequences * (max_pages + _ALIGNMENT)
        )
        self._device = device
        self._on_gpu = device.type != "cpu"
        self._mirrors = [host_words(words, page_locked=self._on_gpu) for _ in range(depth + 1)]
        self._turn = 0
        self._used = 0
        self._buffer = self._mirrors[0].tensor
        if self._on_gpu:
            self._buffer = torch.empty(words, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Call it before the step's first `put`."""
        self._turn = (self._turn + 1) % len(self._mirrors)
        self._used = 0

    def put(self, array: IntArray) -> Tensor:
        start, end = self._used, self._used + len(array)
        if end > len(self._buffer):
            # More than a step needs by its tokens and sequences, such as the biases of many requests.
            return self._send_alone(array)
        self._mirrors[self._turn].array[start:end] = array
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._buffer[start:end]

    def send(self) -> None:
        """Copy everything put so far to the device, in order with its work and without waiting."""
        if self._on_gpu:
            used = min(self._used, len(self._buffer))
            self._buffer[:used].copy_(self._mirrors[self._turn].tensor[:used], non_blocking=True)

    def _send_alone(self, array: IntArray) -> Tensor:
        words = torch.from_numpy(array.copy())
        if not self._on_gpu:
            return words
        # The pinned source belongs to PyTorch's caching host allocator, which reuses it only after the
        # copy has run.
        return words.pin_memory().to(self._device, non_blocking=True)
