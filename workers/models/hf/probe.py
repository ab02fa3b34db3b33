"""Finds out, with one forward pass of one token, how a loaded model uses its attention.

The pass runs with a step object that records instead of computing. It catches, before the first
request, what would otherwise be silently wrong text: layers that keep other state than KV, masks
that the attention call does not mention, unknown keywords, and a geometry unlike the layout's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from transport.wording import first_line
from workers.contract import ModelLoadError
from workers.models.hf.network import network_logits
from workers.models.hf.page_layout import LayerShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.attention.math import AttentionOptions
    from workers.models.hf.loader import LoadedConfig

_log = logging.getLogger(__name__)


@dataclass
class _RecordingStep:
    """A `LayerAttention` that notes each layer's geometry and returns zeros."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if layer in self.shapes:
            self.repeated.add(layer)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = options.window
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def probe_model(
    model: nn.Module, loaded: LoadedConfig, expected: Sequence[LayerShape], device: torch.device
) -> int:
    """Check that `model` can be served with the layout made for `expected`.

    Returns:
        The number of logits.

    Raises:
        ModelLoadError: it cannot be served; the message says why.
    """
    name = type(model).__name__
    _check_modules(model, name)
    step = _RecordingStep()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        logits = network_logits(model, token, token, step, token[0])
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{name} cannot run on this engine: {first_line(error)}") from error
    missing = sorted(set(range(len(expected))) - step.shapes.keys())
    if missing or step.repeated:
        raise ModelLoadError(
            f"{name} has layers that are no ordinary attention layers (the first one is layer "
            f"{min([*missing, *step.repeated])}); only models made of attention layers can be "
            "served."
        )
    found = tuple(step.shapes[i] for i in sorted(step.shapes))
    if found != tuple(expected):
        raise ModelLoadError(
            f"{name} uses other key and value sizes than its configuration says "
            f"({found[0]} instead of {expected[0]} in layer 0); it cannot be served."
        )
    _check_windows(name, loaded, step)
    return int(logits.shape[-1])


def pin_rope(model: nn.Module, max_model_len: int, device: torch.device) -> bool:
    """Fix rotary frequencies that would otherwise depend on the longest sequence of each batch.

    `longrope` and `dynamic` scaling choose by the sequence length at run time. A server must give the same
    result in any batch, so they are computed once for `max_model_len`.

    Returns:
        Whether the model has such scaling, so that its KV depends on `max_model_len`.
    """
    pinned = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and (kinds == "longrope" or "dynamic" in kinds):
            position = torch.full((1, 1), max_model_len - 1, dtype=torch.int64, device=device)
            module(torch.zeros(1, 1, device=device), position)
            module.rope_type = "default"  # type: ignore[assignment]
            pinned = True
            _log.info(
                "The rotary embedding (%s) is fixed for sequences of up to %d tokens.",
                kinds,
                max_model_len,
            )
    return pinned


def _check_modules(model: nn.Module, name: str) -> None:
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(
            f"{name} keeps a recurrent state, which this engine does not implement."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.groups > 1 and "layers." in path:
            raise ModelLoadError(
                f"{name} has a convolution over the sequence ({path}), whose state this engine "
                "does not keep; it cannot be served."
            )


def _check_windows(name: str, loaded: LoadedConfig, step: _RecordingStep) -> None:
    kinds = getattr(loaded.text, "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and step.windows.get(layer) is None:
            raise ModelLoadError(
                f"{name} limits layer {layer} to a sliding window without telling its attention "
                "function, so it would give wrong text; it cannot be served."
            )
