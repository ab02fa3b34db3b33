"""Random weights of the real shapes and storage formats, for runs without a checkpoint.

A tensor's values follow from its name, so every process of a parallel run makes the same ones. They are
scaled by the number of inputs, so that activations stay near one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from math import floor, log2, prod
from typing import TYPE_CHECKING, Final

import torch

from workers.models.deepseek_v41.weights.tensor_table import (
    BYTE_DTYPES,
    FLOAT_DTYPES,
    FP8_DTYPE,
    ExpectedTensor,
    expected_tensors,
    scale_name,
    stored_shape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.weights.checkpoint import NamedTensors, Progress

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOAT_NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Root mean square of the values that random codes stand for: see `_codes`.
_FP8_RMS: Final = 1.2
_FP4_RMS: Final = 2.9
_E8M0_BIAS: Final = 127


@dataclass(frozen=True)
class _Plan:
    tensor: ExpectedTensor
    dtype: str
    data: tuple[int, ...]
    scale: tuple[int, ...] | None

    @property
    def size(self) -> int:
        item = _FLOATS[self.dtype].itemsize if self.dtype in FLOAT_DTYPES else 1
        return prod(self.data) * item + prod(self.scale or (0,))


class DummyWeights:
    """A `WeightSource` that makes its tensors on `device` on demand."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._plans = {
            name: _plan(tensor, config) for name, tensor in expected_tensors(config).items()
        }

    def shards(
        self, wanted: Callable[[str], bool] | None = None, progress: Progress | None = None
    ) -> Iterator[NamedTensors]:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in self._plans:
            if wanted is None or wanted(name):
                layer = name.split(".")[1] if name.startswith("layers.") else ""
                groups[layer].append(name)
        total = sum(self._plans[name].size for group in groups.values() for name in group)
        done = 0
        for group in groups.values():
            yield self._tensors(group)
            done += sum(self._plans[name].size for name in group)
            if progress is not None:
                progress(done, total)

    def scale_of(self, name: str) -> torch.Tensor | None:
        plan = self._plans[name]
        if plan.scale is None:
            return None
        rms = _FP4_RMS if plan.dtype in BYTE_DTYPES else _FP8_RMS
        exponent = floor(log2(plan.tensor.shape[-1] ** -0.5 / rms)) + _E8M0_BIAS
        steps = torch.randint(
            2, plan.scale, dtype=torch.uint8, device=self._device, generator=self._seeded(name, 1)
        )
        return (steps + exponent).view(torch.float8_e8m0fnu)

    def is_packed(self, name: str) -> bool:
        return self._plans[name].dtype in BYTE_DTYPES

    def _tensors(self, names: list[str]) -> NamedTensors:
        for name in names:
            yield name, self._data(name)
            scale = self.scale_of(name)
            if scale is not None:
                yield scale_name(name), scale

    def _data(self, name: str) -> torch.Tensor:
        plan = self._plans[name]
        generator = self._seeded(name, 0)
        if plan.scale is not None:
            return self._codes(plan, generator)
        values = torch.randn(plan.data, device=self._device, generator=generator)
        return _shaped_like(name, values).to(_FLOATS[plan.dtype])

    def _codes(self, plan: _Plan, generator: torch.Generator) -> torch.Tensor:
        codes = torch.randint(
            256, plan.data, dtype=torch.uint8, device=self._device, generator=generator
        )
        if plan.dtype in BYTE_DTYPES:
            return codes
        # Sign, mantissa and the lowest bit of the exponent are random: 0.5 to 1.875.
        return ((codes & 0x8F) | 0x30).view(torch.float8_e4m3fn)

    def _seeded(self, name: str, part: int) -> torch.Generator:
        digest = hashlib.blake2b(f"{name}:{part}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device)
        return generator.manual_seed(int.from_bytes(digest, "little") >> 1)


def _plan(tensor: ExpectedTensor, config: ModelConfig) -> _Plan:
    block = config.quantization.weight_block_size if config.quantization else None
    dtype = tensor.released
    if dtype == "BF16" or (block is None and dtype in {FP8_DTYPE, *BYTE_DTYPES}):
        dtype = _FLOAT_NAMES[config.dtype]
    shapes = stored_shape(tensor, dtype, block)
    if shapes is None:
        raise AssertionError(f"{tensor} contradicts its own released dtype")
    return _Plan(tensor, dtype, shapes.data, shapes.scale)


def _shaped_like(name: str, normal: torch.Tensor) -> torch.Tensor:
    if name == "embed.weight":
        return normal
    if name.endswith(("norm.weight", "q_weight", "k_weight", "_scale")):
        return 1 + 0.1 * normal
    if normal.ndim == 1:
        return 0.1 * normal
    return normal * float(normal.shape[-1] ** -0.5)
