"""Stored states: the part of a sequence's state that a prefix cache keeps, cut out and put back.

A stored state belongs to a position P at a page border and holds the encoder's window KV of the
positions before P (without bounded replay also the decoder's), in rings of `stored_ring` entries. A
device slot may have longer rings, so the entries move; compressor tails are empty at a page border.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hicache.errors import HostPoolError
from workers.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.copies.rows import RowArray
    from workers.models.deepseek_v41.cache.pools import Caches
    from workers.models.deepseek_v41.layout.row_layout import RowLayout


class SlotStates:
    """`StateCodec` of one engine. It reads what all launched steps wrote."""

    def __init__(self, caches: Caches, length_of: Callable[[int], int]) -> None:
        """`length_of` returns how many tokens of the sequence in a slot have been computed."""
        self._caches = caches
        self._length_of = length_of

    @torch.inference_mode()
    def store_state(self, slot: int, position: int, host_state: RowArray) -> None:
        try:
            stored = cut_state(self._caches, slot, position, self._length_of(slot))
        except torch.OutOfMemoryError as error:
            raise HostPoolError(f"a state cannot be cut out: {error}") from error
        torch.from_numpy(host_state).copy_(stored, non_blocking=True)

    @torch.inference_mode()
    def load_state(self, slot: int, position: int, host_state: RowArray) -> None:
        stored = torch.from_numpy(host_state).to(self._caches.states.device, non_blocking=True)
        load_state(self._caches, slot, stored, position)


def cut_state(caches: Caches, slot: int, position: int, length: int) -> Tensor:
    """Cut out the sequence's state at `position`: uint8 [stored_state_bytes] on the device.

    Args:
        caches: the pools.
        slot: whose state.
        position: a multiple of the page size.
        length: how many tokens of the sequence have been computed.

    Raises:
        ValueError: the ring does not hold what the state needs, or `position` is no page boundary.
    """
    layout = caches.layout
    _check_border(position)
    oldest = max(0, position - layout.stored_ring)
    if position > length or length - oldest > layout.encoder_ring:
        raise ValueError(
            f"slot {slot} holds the windows of {layout.encoder_ring} positions before {length}: "
            f"there is no state at {position} in it"
        )
    stored = torch.zeros(layout.stored_state_bytes, dtype=torch.uint8, device=caches.states.device)
    held = torch.arange(oldest, position, device=stored.device)
    target = _rings(stored, layout, layout.stored_ring)
    source = _rings(caches.states[slot], layout, layout.encoder_ring)
    target[:, held % layout.stored_ring] = source[:, held % layout.encoder_ring]
    return stored


def load_state(caches: Caches, slot: int, stored: Tensor, position: int) -> None:
    """Continue in `slot` at `position` from a stored state.

    Args:
        caches: the pools.
        slot: whose state.
        stored: uint8 [stored_state_bytes] on the device, from `cut_state` at `position`.
        position: a multiple of the page size.

    Raises:
        ValueError: `position` is no page boundary, or the state has the wrong size.
    """
    layout = caches.layout
    _check_border(position)
    if stored.shape != (layout.stored_state_bytes,):
        raise ValueError(
            f"a state has {layout.stored_state_bytes} bytes here, not {tuple(stored.shape)}"
        )
    held = torch.arange(max(0, position - layout.stored_ring), position, device=stored.device)
    target = _rings(caches.states[slot], layout, layout.encoder_ring)
    source = _rings(stored, layout, layout.stored_ring)
    target[:, held % layout.encoder_ring] = source[:, held % layout.stored_ring]


def _rings(row: Tensor, layout: RowLayout, ring: int) -> Tensor:
    record = layout.records.window
    step = layout.ring_bytes(ring)
    layers = row[: layout.stored_layers * step].view(layout.stored_layers, step)
    return torch.unflatten(layers[:, : ring * record], 1, (ring, record))


def _check_border(position: int) -> None:
    if position % PAGE_TOKENS:
        raise ValueError(f"position {position} is no page border")
