"""From tokens to Engram embeddings, with the look-back that each sequence keeps between steps.

The tables are in host memory, so the ids are needed there: a prompt's are in the plan, a decode's is
the token that the step before sampled. An engine with Engram layers therefore collects a step before
it launches the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.models.deepseek_v41.engram.hashing import BORDER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transport.framing import TokenArray
    from workers.models.deepseek_v41.engram.hashing import EngramHash
    from workers.models.deepseek_v41.engram.table import EngramTable
    from workers.models.deepseek_v41.engram.warmup import EngramWarmup


class EngramLookup:
    """Look-back of all slots, and the tables by layer, in the order of the hash."""

    def __init__(
        self,
        hashing: EngramHash,
        tables: Mapping[int, EngramTable],
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        warmup: EngramWarmup | None = None,
    ) -> None:
        self._warmup = warmup
        self._hash = hashing
        self._tables = tables
        self._dtype = dtype
        self._device = device
        self._tails = torch.full(
            (max_num_seqs, hashing.look_back), BORDER, dtype=torch.int64, device="cpu"
        )
        self._known: dict[int, TokenArray] = {}
        self._hinted: dict[int, int] = {}
        """By slot: up to which position the rows of its prompt have been asked for ahead."""

    def begin(self, slot: int, known: TokenArray, start: int) -> None:
        """Start a sequence in `slot` whose tokens before `start` are not computed here.

        Args:
            slot: slot of the sequence.
            known: its tokens, int32, as far as they are known.
            start: position of the first token that is computed.
        """
        self._known[slot] = known
        self._hinted[slot] = start
        tail = self._tails[slot]
        tail.fill_(BORDER)
        count = min(len(tail), start, len(known))
        if count:
            tail[-count:] = self._compressed(known[start - count : start])

    def prompts(self, chunks: Sequence[tuple[int, int, TokenArray]]) -> dict[int, Tensor]:
        """Return embeddings by layer, [T, rows * head_dim], for the next tokens of some slots.

        Args:
            chunks: slot, position of the first token, int32 tokens; one chunk per slot.
        """
        ids = []
        for slot, start, tokens in chunks:
            joined = torch.cat((self._tails[slot], self._compressed(tokens)))
            rows = self._hash.row_ids(joined)
            ids.append(rows)
            self._tails[slot] = joined[len(joined) - self._hash.look_back :]
            if self._hinted[slot] < start + len(tokens):
                self._hint(rows)
        embeddings = self._embeddings(torch.cat(ids))
        for slot, start, tokens in chunks:
            self._hint_next(slot, start + len(tokens), len(tokens))
        return embeddings

    def decodes(self, slots: Sequence[int], tokens: Tensor) -> dict[int, Tensor]:
        index = torch.tensor(slots, dtype=torch.int64)
        joined = torch.cat((self._tails[index], self._hash.compressed_ids(tokens)[:, None]), dim=1)
        self._tails[index] = joined[:, 1:]
        rows = self._hash.row_ids(joined)[:, 0]
        self._hint(rows)
        return self._embeddings(rows)

    def _compressed(self, tokens: TokenArray) -> Tensor:
        return self._hash.compressed_ids(torch.from_numpy(tokens.copy()))

    def _hint_next(self, slot: int, start: int, count: int) -> None:
        back = self._hash.look_back
        if start < back:  # it looks back to borders, too: left to that chunk itself
            return
        tokens = self._known[slot][start - back : start + count]
        self._hinted[slot] = start - back + len(tokens)
        if len(tokens) > back and not self._all_in_memory:
            self._hint(self._hash.row_ids(self._compressed(tokens)))

    def _hint(self, row_ids: Tensor) -> None:
        """Have rows [T,layers,rows] read from disk.

        This pays even right before a look-up: a hint reads many rows at a time, whereas the look-up waits for
        one after the other.
        """
        if self._all_in_memory:
            return
        for i, table in enumerate(self._tables.values()):
            table.prefetch(row_ids[:, i])

    @property
    def _all_in_memory(self) -> bool:
        return self._warmup is not None and self._warmup.complete

    def _embeddings(self, row_ids: Tensor) -> dict[int, Tensor]:
        return {
            layer: table.lookup(row_ids[:, i], self._dtype, self._device)
            for i, (layer, table) in enumerate(self._tables.items())
        }
