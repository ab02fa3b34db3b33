"""The two pools on the device: pages of global KV, and one state row a sequence.

Everything here works on records: `formats` says how a vector becomes bytes and back.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.models.deepseek_v41.cache.vector_formats import vector_formats
from workers.models.deepseek_v41.layout.row_layout import entries_per_page

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.layout.row_layout import RowLayout
    from workers.models.deepseek_v41.steps.entries import CompressedEntries
    from workers.models.deepseek_v41.steps.rows import Rows


class Caches:
    """Page pool and state pool, and the views that the layers work on.

    Memory that was never written, or that another sequence left behind, never gets into a result.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: RowLayout,
        num_pages: int,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.formats = vector_formats(config, layout.kv_format, dtype)
        self.pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        """[num_pages, page_bytes]."""
        self.states = torch.zeros(num_slots, layout.state_bytes, dtype=torch.uint8, device=device)
        """[num_slots, state_bytes]."""
        self._entries = {
            source: entries_per_page(config.compress_ratios[source])
            for source in config.kv_source_layer_ids
        }
        self._first_decoder = config.first_decoder_layer
        self._head_dim = config.head_dim

    # ---- windows ----------------------------------------------------------------------------------

    def window_ring(self, layer: int) -> Tensor:
        layout = self.layout
        ring = layout.encoder_ring if layer < self._first_decoder else layout.decoder_ring
        return _view(self.states, layout.window_offsets[layer], (ring, layout.records.window))

    def exchange_window(self, layer: int, slots: Tensor, rows: Rows, window_kv: Tensor) -> Tensor:
        """Put the rows' window KV into the ring and return all keys that the rows may need.

        The ring is read before it is written, because a long chunk overwrites what its first rows look at.

        Args:
            layer: whose ring.
            slots: int64 [B].
            rows: T rows of B sequences, window W.
            window_kv: [T,D].

        Returns:
            [B*(W-1)+T, D]: see `Rows.window_index`. The step's own rows are rounded as the ring rounds them.
        """
        ring = self.window_ring(layer)
        fresh = self.formats.window.encode(window_kv)
        earlier = ring[slots[:, None], rows.history_place].flatten(0, 1)
        ring[rows.written_slot, rows.written_place] = fresh[rows.written_rows]
        return self.formats.window.decode(torch.cat((earlier, fresh)))

    # ---- global KV --------------------------------------------------------------------------------

    def main_kv(self, source: int, address: Tensor) -> Tensor:
        """Main KV [..., D] at int64 addresses [...] from `entry_address`."""
        entries = self._entries[source]
        records = self._main(source)[address // entries, address % entries]
        return self.formats.main.decode(records)

    def index_keys(self, source: int, pages: Tensor) -> Tensor:
        """All index keys [S, P*entries, Di] of the pages, int64 [S,P]."""
        formats, entries = self.formats.index, self._entries[source]
        offset = self.layout.page_offsets[source][0]
        size = entries * formats.record_bytes
        rows = self.pages[:, offset : offset + size][pages]
        return formats.decode_page(rows, entries).flatten(1, 2)

    def write_entries(
        self, source: int, entries: CompressedEntries, main: Tensor, keys: Tensor
    ) -> None:
        """Store main KV [G,D] and index keys [G,Di] of the entries that a step completes."""
        at = (entries.page, entries.place)
        self._main(source)[at] = self.formats.main.encode(main)
        offset, count = self.layout.page_offsets[source][0], self._entries[source]
        for size, records in self.formats.index.encode_parts(keys):
            _view(self.pages, offset, (count, size))[at] = records
            offset += count * size

    def entry_address(self, source: int, page: Tensor, entry: Tensor) -> Tensor:
        entries = self._entries[source]
        return page * entries + entry % entries

    def _main(self, source: int) -> Tensor:
        offset = self.layout.page_offsets[source][1]
        return _view(self.pages, offset, (self._entries[source], self.layout.records.main))

    # ---- compressor tails -------------------------------------------------------------------------

    def tail(self, source: int) -> Tensor:
        """float32 [num_slots, ring, 2, D] of a source of ratio above 1: gate score, then latent."""
        shape = (self.layout.tail_rings[source], 2, self._head_dim)
        flat = _view(self.states, self.layout.tail_offsets[source], (4 * prod(shape),))
        return torch.unflatten(flat.view(torch.float32), 1, shape)


def _view(pool: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    return torch.unflatten(pool[:, offset : offset + prod(shape)], 1, shape)
