"""From tokens to Engram embeddings, with the look-back that each sequence keeps between steps.

The tables are in host memory, so the ids are needed there: a prompt's are in the plan, a decode's is
the token that the step before sampled. An engine with Engram layers therefore collects a step before
it launches the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.models.deepseek_v41.engram_hash import BORDER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workers.engine import TokenArray
    from workers.models.deepseek_v41.engram_hash import EngramHash
    from workers.models.deepseek_v41.engram_table import EngramTable
    from workers.models.deepseek_v41.engram_warmup import EngramWarmup


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
        """`warmup` reads the tables meanwhile; None: nobody does. Both are closed with this object."""
        self._warmup = warmup
        self._hash = hashing
        self._tables = tables
        self._dtype = dtype
        self._device = device
        self._tails = torch.full(
            (max_num_seqs, hashing.look_back), BORDER, dtype=torch.int64, device="cpu"
        )
        self._known: dict[int, TokenArray] = {}

    def begin(self, slot: int, known: TokenArray, start: int) -> None:
        """A sequence begins in `slot`; its tokens before `start` are not computed here.

        Args:
            slot: of the sequence.
            known: its tokens, int32, as far as they are known.
            start: position of the first token that is computed.
        """
        self._known[slot] = known
        tail = self._tails[slot]
        tail.fill_(BORDER)
        count = min(len(tail), start, len(known))
        if count:
            tail[-count:] = self._compressed(known[start - count : start])

    def prompts(self, chunks: Sequence[tuple[int, int, TokenArray]]) -> dict[int, Tensor]:
        """Embeddings by layer, [T, rows * head_dim], of the next tokens of some slots.

        Args:
            chunks: slot, position of the first token, int32 tokens; one a slot.
        """
        ids = []
        for slot, start, tokens in chunks:
            joined = torch.cat((self._tails[slot], self._compressed(tokens)))
            ids.append(self._hash.row_ids(joined))
            self._tails[slot] = joined[len(joined) - self._hash.look_back :]
            end = start + len(tokens)
            self._prefetch(self._known[slot][end - self._hash.look_back : end + len(tokens)])
        return self._embeddings(torch.cat(ids))

    def decodes(self, slots: Sequence[int], tokens: Tensor) -> dict[int, Tensor]:
        """The same for one token a slot, int64 [B] on the host."""
        index = torch.tensor(slots, dtype=torch.int64)
        joined = torch.cat((self._tails[index], self._hash.compressed_ids(tokens)[:, None]), dim=1)
        self._tails[index] = joined[:, 1:]
        return self._embeddings(self._hash.row_ids(joined)[:, 0])

    def close(self) -> None:
        """Let go of the tables."""
        if self._warmup is not None:
            self._warmup.close()
        for table in self._tables.values():
            table.close()

    def _compressed(self, tokens: TokenArray) -> Tensor:
        return self._hash.compressed_ids(torch.from_numpy(tokens.copy()))

    def _prefetch(self, tokens: TokenArray) -> None:
        """Have the rows of what is probably the next chunk read from disk meanwhile."""
        if len(tokens) <= self._hash.look_back:
            return
        row_ids = self._hash.row_ids(self._compressed(tokens))
        for i, table in enumerate(self._tables.values()):
            table.prefetch(row_ids[:, i])

    def _embeddings(self, row_ids: Tensor) -> dict[int, Tensor]:
        """By layer, of row ids [T,layers,rows]."""
        return {
            layer: table.lookup(row_ids[:, i], self._dtype, self._device)
            for i, (layer, table) in enumerate(self._tables.items())
        }
