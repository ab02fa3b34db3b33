"""Cuts a model to fewer layers: for experiments on a device that cannot hold all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from workers.contract import ModelLoadError

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig


def cut_layers(config: ModelConfig, count: int) -> ModelConfig:
    """Keep `count` layers: the first ones of the encoder and the first ones of the decoder.

    Both halves keep their share, so that measurements on the rest say something about the whole. The encoder
    also keeps its first layer that writes global KV, if there is room. Layers are renumbered, and settings
    for a dropped layer go with it.

    Args:
        config: the whole model.
        count: fewer than its layers.

    Raises:
        ModelLoadError: `count` does not leave a layer in each half.
    """
    whole, encoder = config.num_hidden_layers, config.first_decoder_layer
    least = 2 if encoder else 1
    if count < least:
        raise ModelLoadError(
            f"num_hidden_layers is {count}, which leaves no layer for the decoder half: a model cut to "
            f"fewer layers needs at least {least}."
        )
    share = round(count * encoder / whole)
    with_source = min(config.kv_source_layer_ids[0] + 1, encoder)
    kept_encoder = min(max(share, with_source), encoder, count - 1)
    kept = (*range(kept_encoder), *range(encoder, encoder + count - kept_encoder))
    number = {layer: i for i, layer in enumerate(kept)}
    # The primes of an Engram layer's hash follow those of the layers before it.
    engram = tuple(takewhile(number.__contains__, config.engram_layer_ids))
    source = config.candidate_source_layer_id
    return replace(
        config,
        num_hidden_layers=count,
        compress_ratios=tuple(config.compress_ratios[layer] for layer in kept),
        kv_source_layer_ids=_renumbered(config.kv_source_layer_ids, number),
        index_source_layer_ids=_renumbered(config.index_source_layer_ids, number),
        candidate_source_layer_id=None if source is None else number.get(source),
        engram_layer_ids=_renumbered(engram, number),
        engram_num_embeddings=config.engram_num_embeddings[: len(engram)],
    )


def _renumbered(layers: tuple[int, ...], number: dict[int, int]) -> tuple[int, ...]:
    return tuple(number[layer] for layer in layers if layer in number)
