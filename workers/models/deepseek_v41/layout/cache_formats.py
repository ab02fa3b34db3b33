"""The formats of cached vectors: small floats in groups of channels with a scale each.

The model was trained with this rounding, so it is part of the model. A record is one vector:
its values, then its scales. Everything here is branch-free tensor code without transfers, fit for a
CUDA graph. Source: DeepSeek-V4.1 technical report and published reference.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

import torch

from workers.models.deepseek_v41.weights.formats import (
    as_e4m3,
    in_groups,
    pack_fp4,
    scale_values,
    unpack_fp4,
)

_E4M3_MAX: Final = 448.0
_E4M3_TINY: Final = 2.0**-9
_E2M1_MAX: Final = 6.0
_MANTISSA_BITS: Final = 23
_MANTISSA: Final = (1 << _MANTISSA_BITS) - 1


@dataclass(frozen=True)
class RecordFormat:
    name: str
    element: Literal["e4m3", "e2m1"]
    scale: Literal["e8m0", "e4m3"]
    group: int
    """Channels that share a scale."""
    smallest_peak: float
    """A group whose largest magnitude is below this is scaled as if it were this."""

    def data_bytes(self, width: int) -> int:
        return width if self.element == "e4m3" else width // 2

    def record_bytes(self, width: int) -> int:
        return self.data_bytes(width) + width // self.group

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Round vectors `[..., width]` of finite floats.

        Returns:
            Values and scales, uint8 `[..., data_bytes]` and `[..., width / group]`.
        """
        groups = in_groups(x.to(torch.float32), self.group)
        peak = groups.abs().amax(-1).clamp(min=self.smallest_peak)
        scale, factor = self._scales(peak)
        scaled = (groups / factor.unsqueeze(-1)).flatten(-2)
        if self.element == "e4m3":
            return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale
        return pack_fp4(scaled), scale

    def dequantize(self, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = as_e4m3(data).to(torch.float32) if self.element == "e4m3" else unpack_fp4(data)
        factor = scale_values(scale) if self.scale == "e8m0" else as_e4m3(scale).to(torch.float32)
        return (in_groups(values, self.group) * factor.unsqueeze(-1)).flatten(-2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode vectors `[..., width]` as records, uint8 `[..., record_bytes]`."""
        return torch.cat(self.quantize(x), dim=-1)

    def decode(self, records: torch.Tensor) -> torch.Tensor:
        """Decode records, uint8 `[..., record_bytes]`, to float32 `[..., width]`."""
        per_byte = 1 if self.element == "e4m3" else 2
        # record_bytes = width / per_byte + width / group
        width = records.shape[-1] * per_byte * self.group // (self.group + per_byte)
        values = self.data_bytes(width)
        return self.dequantize(
            records[..., :values].contiguous(), records[..., values:].contiguous()
        )

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as the cache would give it back, in its own dtype."""
        return self.dequantize(*self.quantize(x)).to(x.dtype)

    def _scales(self, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scale == "e4m3":
            code = (peak / _E2M1_MAX).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
            return code.view(torch.uint8), code.to(torch.float32)
        code = _power_of_two_above(peak, _E4M3_MAX if self.element == "e4m3" else _E2M1_MAX)
        return code, scale_values(code)


def _power_of_two_above(peak: torch.Tensor, limit: float) -> torch.Tensor:
    """E8M0 byte of the smallest power of two s with `peak / s <= limit`.

    Works on the bits of normal float32 numbers, since a float logarithm may be off at powers of two.
    """
    bits = peak.view(torch.int32)
    limit_bits: int = struct.unpack("<i", struct.pack("<f", limit))[0]
    exponent = (bits >> _MANTISSA_BITS) - (limit_bits >> _MANTISSA_BITS)
    exponent = exponent + ((bits & _MANTISSA) > (limit_bits & _MANTISSA)).to(torch.int32)
    code: torch.Tensor = exponent + 127
    return code.to(torch.uint8)


WINDOW_KV: Final = RecordFormat("fp8_g32_ue8m0", "e4m3", "e8m0", 32, 1e-4)
GLOBAL_KV: Final = RecordFormat("fp4_g16_e4m3", "e2m1", "e4m3", 16, _E2M1_MAX * _E4M3_TINY)
INDEX_KEY: Final = RecordFormat("fp4_g32_ue8m0", "e2m1", "e8m0", 32, _E2M1_MAX * 2.0**-126)
