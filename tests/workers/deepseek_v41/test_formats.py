"""Storage formats of weights and cached vectors: golden bits, and what rounding promises."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from workers.models.deepseek_v41.layout.cache_formats import (
    GLOBAL_KV,
    INDEX_KEY,
    WINDOW_KV,
    RecordFormat,
)
from workers.models.deepseek_v41.weights.formats import (
    dequantize,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_rows,
    pack_fp4,
    scale_values,
    unpack_fp4,
)

QUANTISED = Path(__file__).parents[2] / "data" / "v41_tiny_quant"
FORMATS = (WINDOW_KV, GLOBAL_KV, INDEX_KEY)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

all_formats = pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
            ],
        ),
    ],
)


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(QUANTISED / "golden_formats.safetensors")


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@devices
@all_formats
def test_golden_rows_bit_for_bit(golden, form: RecordFormat, device):
    data, scale = form.quantize(golden["x"].to(device))
    assert same_bits(data, golden[f"{form.name}.data"])
    assert same_bits(scale, golden[f"{form.name}.scale"])
    assert same_bits(form.dequantize(data, scale), golden[f"{form.name}.dequant"])


@pytest.mark.parametrize(
    ("form", "width", "size"),
    [(WINDOW_KV, 512, 528), (GLOBAL_KV, 512, 288), (INDEX_KEY, 128, 68)],
    ids=lambda v: getattr(v, "name", v),
)
def test_records_of_the_released_model(form, width, size):
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(1))
    records = form.encode(x)
    assert records.dtype == torch.uint8
    assert records.shape == (3, 5, size)
    assert form.record_bytes(width) == size
    assert torch.equal(form.decode(records), form.dequantize(*form.quantize(x)))


def codebook(form: RecordFormat) -> torch.Tensor:
    if form.element == "e2m1":
        return torch.tensor(E2M1 + [-v for v in E2M1])
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return codes[codes.isfinite()]


def factors(form: RecordFormat, scale: torch.Tensor) -> torch.Tensor:
    values = scale_values(scale) if form.scale == "e8m0" else scale.view(torch.float8_e4m3fn)
    return values.to(torch.float64).repeat_interleave(form.group, -1)


vectors = st.tuples(
    st.lists(
        st.one_of(
            st.floats(-2600, 2600, width=32), st.sampled_from([0.25, 1.25, 2.5, 5.0, -448.0, 0.0])
        ),
        min_size=32,
        max_size=32,
    ),
    st.integers(-12, 0),
).map(lambda drawn: torch.tensor(drawn[0], dtype=torch.float32) * 2.0 ** drawn[1])


@all_formats
@given(x=vectors)
@settings(deadline=None)
def test_every_value_goes_to_the_nearest_one(form: RecordFormat, x):
    data, scale = form.quantize(x)
    factor = factors(form, scale)
    error = (form.dequantize(data, scale).double() - x.double()).abs()
    possible = codebook(form).double()[:, None] * factor
    best = (possible - x.double()).abs().amin(0)
    # With a scale that is no power of two, x / scale is itself rounded before it is compared.
    slack = 0 if form.scale == "e8m0" else x.abs().double() * 2.0**-23
    assert (error <= best + slack).all()


@pytest.mark.parametrize("form", [WINDOW_KV, INDEX_KEY], ids=lambda f: f.name)
@given(x=vectors)
@settings(deadline=None)
def test_a_power_of_two_scale_is_the_smallest_that_fits(form: RecordFormat, x):
    _, scale = form.quantize(x)
    limit = 448 if form.element == "e4m3" else 6
    factor = factors(form, scale)[0]
    peak = max(x.abs().max().double(), torch.tensor(form.smallest_peak).double())
    assert peak / factor <= limit
    assert peak / (factor / 2) > limit


@all_formats
@given(x=vectors)
@settings(deadline=None)
def test_rounding_twice_is_rounding_once(form: RecordFormat, x):
    if form.scale == "e4m3":  # below the normal numbers its scale has too few bits for that
        x = x.clone()
        x[0], x[16] = 7.0, -9.0
    once = form.rounded(x)
    assert torch.equal(form.rounded(once), once)


@all_formats
@pytest.mark.parametrize("exponent", range(-20, 12))
def test_a_peak_at_a_power_of_two_times_the_limit_is_exact(form: RecordFormat, exponent):
    limit = 448 if form.element == "e4m3" else 6
    largest = 6 * 448 if form.scale == "e4m3" else 1e30
    x = torch.zeros(32)
    x[0] = min(max(limit * 2.0**exponent, form.smallest_peak), largest)
    assert torch.equal(form.rounded(x), x)


def test_values_beyond_the_largest_scale_saturate():
    x = torch.full((16,), 1e6)
    assert torch.equal(GLOBAL_KV.rounded(x), torch.full((16,), 2688.0))


def test_rounding_keeps_the_dtype():
    x = torch.randn(4, 64).to(torch.bfloat16)
    assert WINDOW_KV.rounded(x).dtype == torch.bfloat16


def test_every_packed_byte_survives():
    packed = torch.arange(256, dtype=torch.uint8)
    values = unpack_fp4(packed)
    assert values.view(256, 2)[:16, 0].tolist() == E2M1 + [-v for v in E2M1]
    assert torch.equal(pack_fp4(values), packed)


def test_the_low_nibble_is_the_even_channel():
    assert unpack_fp4(torch.tensor([0xE5], dtype=torch.uint8)).tolist() == [3.0, -4.0]


def test_golden_weights_are_met_exactly():
    golden = load_file(QUANTISED / "golden.safetensors")
    weights = load_file(QUANTISED / "model.safetensors")
    names = [name for name in golden if name.startswith("dequant.")]
    assert len(names) == 5
    for name in names:
        stored = name.removeprefix("dequant.")
        data, scale = weights[stored], weights[stored.removesuffix("weight") + "scale"]
        if "engram.embed" in stored:
            found = dequantize_rows(data, scale)
        else:
            found = dequantize(data, scale, (32, 32))
        expected = golden[name]
        assert torch.equal(found[tuple(map(slice, expected.shape))], expected), name


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_blocks_at_the_edge_are_cut_off(rows, columns, block_rows, block_columns):
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    data = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    blocks = (-(-rows // block_rows), -(-columns // block_columns))
    exponents = torch.randint(110, 140, blocks, generator=generator, dtype=torch.uint8)
    found = dequantize_fp8(data, exponents, (block_rows, block_columns))
    for r in range(rows):
        for c in range(columns):
            exponent = int(exponents[r // block_rows, c // block_columns]) - 127
            assert found[r, c] == data[r, c].float() * 2.0**exponent


def test_extreme_scale_bytes():
    assert scale_values(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [
        2.0**-127,
        1.0,
        2.0**127,
    ]


def test_signed_and_unsigned_bytes_hold_the_same_experts():
    packed = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
    scale = torch.full((4, 2), 127, dtype=torch.uint8)
    assert torch.equal(
        dequantize_fp4(packed.view(torch.int8), scale), dequantize_fp4(packed, scale)
    )


def test_an_unquantised_weight_passes_through():
    weight = torch.randn(3, 5)
    assert torch.equal(dequantize(weight, None, (32, 32)), weight)
