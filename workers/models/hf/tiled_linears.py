"""Batch-invariant linear layers of transformers models, on a CPU.

What is no linear layer or attention (norms, activations, rotary embeddings) treats every element or row by
itself, which on one CPU thread gives equal bits too.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from workers.attention.batch import Batch
from workers.attention.row_tiles import Tile, map_rows, position_tiles
from workers.contract import ModelLoadError

EXPERT_DIMENSIONS = 3


class TiledLinears:
    """Makes a model's linear layers work on the tiles of the step under way."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        """Replace the `forward` of every linear layer of `model`, and of its output layer `head`.

        Raises:
            ModelLoadError: the model has matrices that are no linear layers, such as experts.
        """
        self._tiles: list[Tile] = []
        self._head_tiles: list[Tile] = []
        for name, parameter in model.named_parameters():
            if parameter.dim() >= EXPERT_DIMENSIONS:
                raise ModelLoadError(
                    f"--deterministic does not cover the experts of {type(model).__name__} ({name}): "
                    "run it without."
                )
        for module in model.modules():
            if isinstance(module, nn.Linear):
                self._replace(module, is_head=module is head)

    def begin(self, batch: Batch) -> None:
        self._tiles = position_tiles([(s.start, s.rows) for s in batch.segments])
        self._head_tiles = position_tiles([(row.position, 1) for row in batch.logit_rows])

    def _replace(self, linear: nn.Linear, *, is_head: bool) -> None:
        def product(rows: Tensor) -> tuple[Tensor]:
            return (functional.linear(rows, linear.weight, linear.bias),)

        def forward(x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            # A few models compute the logits of every row.
            only_sampled = is_head and len(flat) == len(self._head_tiles)
            tiles = self._head_tiles if only_sampled else self._tiles
            return map_rows(product, (flat,), tiles)[0].view(*x.shape[:-1], linear.out_features)

        linear.forward = forward  # type: ignore[method-assign,assignment]
