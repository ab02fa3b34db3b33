"""Puts a checkpoint's tensors into the model, in the types that the model computes with."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from workers.contract import ModelLoadError
from workers.models.deepseek_v41.moe.experts import Experts
from workers.models.deepseek_v41.weights.formats import dequantize
from workers.models.deepseek_v41.weights.tensor_table import (
    EXPERT_NAME,
    FP4_GROUP,
    expected_tensors,
    is_engram_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.models.deepseek_v41.model.model import DeepseekV41
    from workers.models.deepseek_v41.weights.checkpoint import WeightSource

_SCALE: Final = ".scale"
_IMAGE_BIAS: Final = ".gate.bias_vl"
"""The router's bias for image tokens, which do not occur."""


class WeightLoader:
    """Fills one model from one source.

    Dense FP8 matrices are converted to the compute type. Routed experts in FP4 stay packed.
    """

    def __init__(
        self, model: DeepseekV41, source: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._source = source
        self._dtype = dtype
        self._device = device
        quantization = model.config.quantization
        self._block = quantization.weight_block_size if quantization else (1, 1)

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        for shard in self._source.shards(_is_parameter, progress):
            for name, stored in shard:
                if not name.endswith(_SCALE):
                    self._put(name, stored)
        missing = [name for name, value in self._model.named_parameters() if value.is_meta]
        missing += [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, Experts) and not module.complete
        ]
        if missing:
            raise ModelLoadError(f"The checkpoint has no {missing[0]}; it is incomplete.")

    def _put(self, name: str, stored: Tensor) -> None:
        data = stored.to(self._device)
        scale = self._source.scale_of(name)
        if scale is not None:
            scale = scale.to(self._device)
        expert = EXPERT_NAME.fullmatch(name)
        if expert is not None:
            self._put_expert(expert, data, scale)
            return
        module_name, _, leaf = parameter_name(name).rpartition(".")
        module = self._model.get_submodule(module_name)
        dtype = module.get_parameter(leaf).dtype
        weight = dequantize(data, scale, self._block, dtype)
        if weight.data_ptr() == stored.data_ptr():
            weight = weight.clone()  # not a view of the mapped file
        setattr(module, leaf, nn.Parameter(weight, requires_grad=False))

    def _put_expert(self, name: re.Match[str], data: Tensor, scale: Tensor | None) -> None:
        experts = self._model.get_submodule(name["module"])
        assert isinstance(experts, Experts)
        matrix, index = name["matrix"], int(name["id"])
        if data.dtype == torch.uint8 and scale is not None:
            experts.put(f"{matrix}_scale", index, scale)
        else:
            data = dequantize(data, scale, self._block, self._dtype)
        experts.put(matrix, index, data)


def weight_bytes(model: DeepseekV41, source: WeightSource, dtype: torch.dtype) -> int:
    """Bytes that the loaded weights take on the device, computed from shapes and types alone.

    Leaves out the Engram tables. A matrix takes more for a moment while it is decoded.
    """
    total = sum(value.numel() * value.element_size() for value in model.parameters())
    for name, tensor in expected_tensors(model.config).items():
        if EXPERT_NAME.fullmatch(name):
            values = prod(tensor.shape)
            packed = values // 2 + values // FP4_GROUP
            total += packed if source.is_packed(name) else values * dtype.itemsize
    return total


def parameter_name(tensor_name: str) -> str:
    return re.sub(r"\.hc_(attn|ffn)_", r".hc_\1.", tensor_name)


def _is_parameter(name: str) -> bool:
    return not is_engram_table(name) and not name.endswith(_IMAGE_BIAS)
