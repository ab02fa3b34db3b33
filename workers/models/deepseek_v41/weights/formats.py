"""Exact decoding of the checkpoint's storage formats to float.

FP8 is OCP e4m3 (`fn`), FP4 is OCP e2m1, scales are E8M0: byte e means 2**(e - 127). A stored value
times its scale is exact in float32 for all of them.
"""

from __future__ import annotations

import torch

from workers.models.deepseek_v41.weights.tensor_table import FP4_GROUP, ROW_GROUP


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode a stored weight to `dtype` from any format: unquantised, FP8 blocks or packed FP4.

    Args:
        data: as it stands in the checkpoint; bytes (`uint8`, `int8`) are packed FP4.
        scale: None for an unquantised weight.
        block: rows and columns that share a scale in FP8 weights.
    """
    if scale is None:
        return data.to(dtype)
    if data.dtype in (torch.uint8, torch.int8):
        return dequantize_fp4(data, scale, dtype)
    return dequantize_fp8(data, scale, block, dtype)


def dequantize_fp8(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode e4m3 `data [rows, columns]` with one scale per `block`; blocks are cut off at the edges.

    `scale` is E8M0 `[ceil(rows / block[0]), ceil(columns / block[1])]`.
    """
    rows, columns = data.shape
    factors = scale_values(scale)
    values = as_e4m3(data).to(torch.float32)
    if rows % block[0] == 0 and columns % block[1] == 0:
        tiles = values.view(rows // block[0], block[0], columns // block[1], block[1])
        return (tiles * factors[:, None, :, None]).view(rows, columns).to(dtype)
    spread = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)
    return (values * spread[:, :columns]).to(dtype)


def dequantize_fp4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode packed e2m1 `[rows, columns / 2]` with E8M0 scales `[rows, columns / FP4_GROUP]`."""
    groups = in_groups(unpack_fp4(packed), FP4_GROUP)
    return (groups * scale_values(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_rows(
    data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode Engram rows: e4m3 `[..., columns]` with E8M0 scales `[..., columns / ROW_GROUP]`."""
    groups = in_groups(as_e4m3(data).to(torch.float32), ROW_GROUP)
    return (groups * scale_values(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Convert E8M0 scales (`float8_e8m0fnu` or their bytes) to float32 powers of two."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def as_e4m3(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float8_e4m3fn)


def in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Decode e2m1 pairs `[..., n]` to float32 `[..., 2 n]`. The low nibble comes first."""
    nibbles = packed.view(torch.uint8)
    codes = torch.stack([nibbles & 0xF, nibbles >> 4], dim=-1).flatten(-2)
    # 0, 0.5, 1, 1.5 | 2, 3 | 4, 6. Arithmetic, not a table: a table would have to be copied to the
    # device, which must not happen while a CUDA graph is recorded.
    code = (codes & 7).to(torch.float32)
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes >= 8, -magnitude, magnitude)


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """Round float32 `[..., 2 n]` to e2m1 and pack: uint8 `[..., n]`, the low nibble first.

    Rounds to the nearest value, ties to the even code, and saturates at +-6.
    """
    size = values.abs().clamp(max=6.0)
    # The spacing of values is 0.5 below 2, 1 below 4, then 2; `round` takes ties to even.
    code = torch.where(
        size < 2,
        (2 * size).round(),
        torch.where(size < 4, size.round() + 2, (size / 2).round() + 4),
    ).to(torch.uint8)
    code = code | (values.signbit().to(torch.uint8) << 3)
    pairs = in_groups(code, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)
