"""Which rows of the Engram tables a token reads: hashes of the last two, three and four tokens.

Token ids are first mapped to *compressed* ids, so that spellings that differ in case, accents or
spaces share their n-grams. The ids of an n-gram are multiplied with fixed odd numbers and joined by
exclusive or; each head reduces the result modulo a prime of its own, which is the number of its rows.
Source: the Engram section of the DeepSeek-V4.1 technical report and the published reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from math import isqrt, prod
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from workers.contract import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.models.deepseek_v41.config.model_config import ModelConfig

BORDER: Final = -1
"""Compressed id of a place that ends the look-back: before the sequence, or an image token."""

_SEED_STEP: Final = 10007
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True)
class HashConstants:
    """Constants of the hash, int64, on the CPU."""

    multipliers: torch.Tensor
    """`[layers, max_ngram_size]`, by the distance of the token looked back to."""
    primes: torch.Tensor
    """`[layers, max_ngram_size - 1, heads]`: rows of each head, by n-gram size from 2 on."""
    offsets: torch.Tensor
    """`[layers, (max_ngram_size - 1) * heads]`: first row of each head in the layer's table."""


def hash_constants(config: ModelConfig) -> HashConstants:
    """Raises `ModelLoadError` if `engram_num_embeddings` is not the sum of the primes."""
    layers, heads = config.engram_layer_ids, config.engram_n_heads
    shape = (len(layers), config.engram_max_ngram_size - 1, heads)
    primes = np.fromiter(
        islice(_primes_from(config.engram_vocab_size), prod(shape)), dtype=np.int64
    ).reshape(shape)
    rows = primes.reshape(len(layers), shape[1] * heads)
    for layer, expected, found in zip(
        layers, config.engram_num_embeddings, rows.sum(axis=1), strict=True
    ):
        if expected != found:
            raise ModelLoadError(
                f"engram_num_embeddings is {expected} for layer {layer}, but the hash of "
                f"{heads} heads from engram_vocab_size {config.engram_vocab_size} on needs {found}."
            )
    return HashConstants(
        multipliers=torch.from_numpy(np.stack([_multipliers(config, layer) for layer in layers]))
        if layers
        else torch.empty(0, config.engram_max_ngram_size, dtype=torch.int64),
        primes=torch.from_numpy(primes),
        offsets=torch.from_numpy(np.cumsum(rows, axis=1) - rows),
    )


def _multipliers(config: ModelConfig, layer: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    # Odd, and small enough that the product with any compressed id stays below 2**63.
    bound = max(1, _INT64_MAX // config.engram_compressed_vocab_size // 2)
    generator = np.random.default_rng(_SEED_STEP * layer)
    return generator.integers(0, bound, config.engram_max_ngram_size, dtype=np.int64) * 2 + 1


def _primes_from(start: int) -> Iterator[int]:
    """All primes >= `start`, ascending. Every head takes the next one, so none is used twice."""
    return (n for n in count(max(start, 2)) if all(n % d for d in range(2, isqrt(n) + 1)))


class EngramHash:
    """Maps token ids to Engram row ids, for all layers at once. Holds its constants on one device.

    Args:
        token_map: int64 `[vocab_size]`, compressed id by token id; see `engram_token_map`.
    """

    def __init__(
        self, config: ModelConfig, token_map: torch.Tensor, device: torch.device | str = "cpu"
    ) -> None:
        constants = hash_constants(config)
        self.look_back = config.engram_max_ngram_size - 1
        """How many earlier compressed ids belong to the state of a sequence."""
        self._pad = int(token_map[config.engram_pad_token_id])
        with_borders = token_map.to(torch.int64).clone()
        image = config.image_token_id
        if image is not None and 0 <= image < len(with_borders):
            with_borders[image] = BORDER
        self._token_map = with_borders.to(device)
        self._multipliers = constants.multipliers.to(device)
        self._primes = constants.primes.to(device)
        self._offsets = constants.offsets.to(device)

    def compressed_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compressed ids, int64, of `token_ids` (any integer dtype and shape). Images map to `BORDER`."""
        return self._token_map[token_ids.to(torch.int64)]

    def row_ids(self, compressed: torch.Tensor) -> torch.Tensor:
        """Rows that each token reads from each layer's table.

        Args:
            compressed: int64 `[..., look_back + T]`, the compressed ids of `T` consecutive tokens,
                preceded by those of the `look_back` tokens before them (`BORDER` before the start).

        Returns:
            int64 `[..., T, layers, row_count]`, in the order in which the rows are concatenated:
            n-gram sizes ascending, heads ascending within one size.
        """
        size = self.look_back + 1
        # Newest first: places[..., k] is the token k places before.
        places = compressed.unfold(-1, size, 1).flip(-1)
        within = (places == BORDER).cumsum(-1) == 0  # up to the first border
        ids = torch.where(within, places, self._pad)
        products = ids.unsqueeze(-2) * self._multipliers  # [..., T, layers, size]
        mixed = products[..., 0]
        by_size = []
        for place in range(1, size):
            mixed = mixed ^ products[..., place]
            by_size.append(mixed)
        hashes = torch.stack(by_size, dim=-1).unsqueeze(-1)  # [..., T, layers, sizes, 1]
        return (hashes % self._primes).flatten(-2) + self._offsets
