"""Opening a DeepSeek-V4.1 checkpoint: what is read, and what is refused before any long work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transport.model_files import ModelError
from workers.contract import ModelLoadError
from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.loading.load_progress import load_progress
from workers.models.deepseek_v41.weights.checkpoint import Checkpoint, open_checkpoint
from workers.models.deepseek_v41.weights.dummy import DummyWeights
from workers.models.deepseek_v41.weights.formats import dequantize
from workers.models.deepseek_v41.weights.tensor_table import (
    expected_tensors,
    is_engram_table,
    stored_shape,
)

TINY = Path(__file__).parents[2] / "data" / "v41_tiny"
QUANTISED = TINY.with_name("v41_tiny_quant")
CONFIG = read_config(QUANTISED)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return load_file(QUANTISED / "model.safetensors")


def save(folder: Path, weights: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    save_file(weights, folder / name)
    return folder / name


def save_in_shards(folder: Path, weights: dict[str, torch.Tensor], count: int = 3) -> list[Path]:
    names = sorted(weights)
    parts = [names[i::count] for i in range(count)]
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for part, file in zip(parts, files, strict=True):
        save(folder, {name: weights[name] for name in part}, file)
    index = {n: file for part, file in zip(parts, files, strict=True) for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return [folder / file for file in files]


def everything(checkpoint: Checkpoint, **options) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for shard in checkpoint.shards(**options) for name, tensor in shard
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("folder", [TINY, QUANTISED], ids=lambda p: p.name)
def test_the_golden_checkpoints_are_read_completely(folder):
    expected = load_file(folder / "model.safetensors")
    found = everything(open_checkpoint(folder, read_config(folder)))
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_are_one_checkpoint(tmp_path, weights, with_index):
    save_in_shards(tmp_path, weights)
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(tmp_path, CONFIG)
    assert len(list(checkpoint.shards())) == 3
    found = everything(checkpoint)
    assert found.keys() == weights.keys()
    assert all(same(found[name], weights[name]) for name in found)


def test_a_scale_is_found_in_whatever_shard_it_lies(tmp_path, weights):
    save_in_shards(tmp_path, weights)
    checkpoint = open_checkpoint(tmp_path, CONFIG)
    golden = load_file(QUANTISED / "golden.safetensors")
    name = "layers.2.attn.wq_b.weight"
    found = dequantize(checkpoint.read(name), checkpoint.scale_of(name), (32, 32))
    assert torch.equal(found[:96, :32], golden[f"dequant.{name}"])
    assert checkpoint.scale_of("norm.weight") is None
    checkpoint.close()


def test_only_what_is_wanted_is_read_and_counted(tmp_path, weights):
    save_in_shards(tmp_path, weights)
    seen: list[tuple[int, int]] = []
    found = everything(
        open_checkpoint(tmp_path, CONFIG),
        wanted=lambda name: name.startswith("layers.1.") and not is_engram_table(name),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert "layers.1.engram.wkv.scale" in found
    assert not any(is_engram_table(name) or name.startswith("layers.2") for name in found)
    sizes = sum(tensor.nbytes for tensor in found.values())
    assert {total for _, total in seen} == {sizes}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == sizes


def test_names_may_have_a_prefix_and_other_parts_are_left_out(tmp_path, weights):
    prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name in ("mtp.0.norm.weight", "vision.x", "aligner.w1", "image_start"):
        prefixed[name] = torch.zeros(2)
    del prefixed["model.layers.0.ffn.gate.bias_vl"]
    save(tmp_path, prefixed)
    found = everything(open_checkpoint(tmp_path, CONFIG))
    assert found.keys() == weights.keys() - {"layers.0.ffn.gate.bias_vl"}


def test_bytes_of_either_label_are_the_same_experts(tmp_path, weights):
    name = "layers.0.ffn.experts.3.w1.weight"
    weights[name] = weights[name].view(torch.uint8)
    save(tmp_path, weights)
    tensor = open_checkpoint(tmp_path, CONFIG).read(name)
    assert tensor.dtype == torch.uint8
    assert torch.equal(tensor, weights[name])
    assert open_checkpoint(QUANTISED, CONFIG).read(name).dtype == torch.uint8


def test_the_header_decides_how_a_tensor_is_stored(tmp_path, weights):
    name = "layers.0.attn.wkv.weight"
    weights[name] = weights[name].to(torch.bfloat16)
    del weights["layers.0.attn.wkv.scale"]
    save(tmp_path, weights)
    assert open_checkpoint(tmp_path, CONFIG).scale_of(name) is None


def without(weights, name):
    del weights[name]


def resized(weights, name, *shape):
    weights[name] = torch.zeros(shape, dtype=weights[name].dtype)


def retyped(weights, name, dtype):
    weights[name] = torch.zeros(weights[name].shape, dtype=dtype)


def unpacked(weights, name):
    rows, half = weights[f"{name}.weight"].shape
    weights[f"{name}.weight"] = torch.zeros(rows, 2 * half, dtype=torch.bfloat16)
    del weights[f"{name}.scale"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: without(w, "norm.weight"), r"lacks 1 tensors .* norm\.weight"),
        (
            lambda w: without(w, "layers.6.attn.wkv.scale"),
            r"lacks 1 .* layers\.6\.attn\.wkv\.scale",
        ),
        (
            lambda w: [w.pop(n) for n in list(w) if n.startswith("layers.9.")],
            r"lacks \d\d+ tensors .* layers\.9\.",
        ),
        (lambda w: w.update(odd=torch.zeros(1)), r"holds 1 tensors .* odd"),
        (
            lambda w: w.update({"layers.0.attn.wkv.weight_scale_inv": torch.zeros(2, 3)}),
            "weight_scale_inv",
        ),
        (lambda w: w.update({"layers.0.attn.kv_norm.scale": torch.zeros(1)}), "kv_norm.scale"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(96)}), "norm.weight is stored twice"),
        (
            lambda w: resized(w, "layers.0.attn.q_norm.weight", 33),
            r"q_norm\.weight .* shape \[33\], .* \[32\]",
        ),
        (
            lambda w: resized(w, "layers.0.attn.wkv.scale", 2, 2),
            r"attn\.wkv\.scale .* \[2, 2\], .* \[2, 3\]",
        ),
        (lambda w: resized(w, "layers.0.ffn.experts.0.w1.weight", 32, 96), r"\[32, 48\]"),
        (
            lambda w: retyped(w, "layers.0.attn.wkv.weight", torch.float8_e5m2),
            r"attn\.wkv\.weight .* F8_E5M2",
        ),
        (lambda w: retyped(w, "layers.0.attn.wkv.weight", torch.int8), r"attn\.wkv\.weight .* I8"),
        (lambda w: retyped(w, "norm.weight", torch.float8_e4m3fn), r"norm\.weight .* F8_E4M3"),
        (
            lambda w: retyped(w, "layers.0.attn.wkv.scale", torch.float32),
            r"attn\.wkv\.scale .* F32",
        ),
        (
            lambda w: unpacked(w, "layers.4.ffn.experts.3.w2"),
            r"layers\.4\.ffn\.experts\.3\.w2\.weight .* BF16, but 7 other experts .* I8",
        ),
        (
            lambda w: [unpacked(w, f"layers.4.ffn.experts.{e}.w2") for e in range(8) if e != 5],
            r"layers\.4\.ffn\.experts\.5\.w2\.weight .* I8, but 7 other experts .* BF16",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, weights, change, said):
    change(weights)
    save(tmp_path, weights)
    with pytest.raises(ModelLoadError, match=said):
        open_checkpoint(tmp_path, CONFIG)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("dtype", "called"), [(torch.int32, "I32"), (torch.float64, "F64")])
def test_a_type_that_is_not_known_is_no_matter_of_quantisation(tmp_path, quantised, dtype, called):
    folder = QUANTISED if quantised else TINY
    weights = load_file(folder / "model.safetensors")
    retyped(weights, "layers.0.attn.q_norm.weight", dtype)
    save(tmp_path, weights)
    said = rf"layers\.0\.attn\.q_norm\.weight in .* is stored as {called}, a type that is not known"
    with pytest.raises(ModelLoadError, match=said):
        open_checkpoint(tmp_path, read_config(folder))


def test_experts_may_be_unpacked_if_all_of_a_matrix_are(tmp_path, weights):
    for expert in range(8):
        unpacked(weights, f"layers.4.ffn.experts.{expert}.w2")
    save(tmp_path, weights)
    assert len(open_checkpoint(tmp_path, CONFIG).tensors) == len(weights)


def test_quantised_tensors_need_a_quantised_configuration():
    with pytest.raises(ModelLoadError, match="no quantization_config"):
        open_checkpoint(QUANTISED, replace(CONFIG, quantization=None))


@pytest.mark.parametrize("kept", [0, 5, 100, -1, -100_000])
def test_a_truncated_shard_is_refused(tmp_path, weights, kept):
    shard = save_in_shards(tmp_path, weights)[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=f"{shard.name} is truncated"):
        open_checkpoint(tmp_path, CONFIG)


def test_a_shard_with_a_tail_is_refused(tmp_path, weights):
    shard = save_in_shards(tmp_path, weights)[1]
    with shard.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ModelLoadError, match=f"{shard.name} is damaged"):
        open_checkpoint(tmp_path, CONFIG)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [1]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"{" * 9,
        b"\xff\xfe",
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        open_checkpoint(tmp_path, CONFIG)


def test_an_lfs_pointer_is_recognised(tmp_path, weights):
    shard = save_in_shards(tmp_path, weights)[2]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ModelLoadError, match="LFS pointer"):
        open_checkpoint(tmp_path, CONFIG)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(tmp_path, weights, with_index):
    save_in_shards(tmp_path, weights)[1].unlink()
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1 of 3 shards, the first one is .*2"):
        open_checkpoint(tmp_path, CONFIG)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        open_checkpoint(tmp_path, CONFIG)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="has no weights"):
        open_checkpoint(tmp_path, CONFIG)


def test_sizes_of_the_released_checkpoint():
    config = read_config(TINY.with_name("v41_released"))
    item = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1}
    experts = tables = rest = 0
    for name, tensor in expected_tensors(config).items():
        shapes = stored_shape(tensor, tensor.released, (32, 32))
        size = torch.Size(shapes.data).numel() * item[tensor.released]
        size += torch.Size(shapes.scale).numel() if shapes.scale else 0
        if ".experts." in name:
            experts += size
        elif is_engram_table(name):
            tables += size
        else:
            rest += size
    assert round(experts / 2**30, 1) == 268.9
    assert round(tables / 2**31, 1) == 94.4
    assert round(rest / 2**30, 1) == 9.2


@pytest.mark.parametrize("folder", [TINY, QUANTISED], ids=lambda p: p.name)
def test_dummy_weights_are_a_checkpoint_of_the_same_kind(tmp_path, folder):
    config = read_config(folder)
    dummy = DummyWeights(config, "cpu")
    made = {name: tensor for shard in dummy.shards() for name, tensor in shard}
    real = load_file(folder / "model.safetensors")
    assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in real.items()}
    as_bytes = {torch.int8: torch.uint8}
    for name, tensor in made.items():
        assert tensor.dtype == as_bytes.get(real[name].dtype, real[name].dtype), name
    save(tmp_path, made)
    open_checkpoint(tmp_path, config)


def test_dummy_weights_depend_on_the_name_alone():
    def made() -> dict[str, torch.Tensor]:
        weights = DummyWeights(CONFIG, "cpu")
        return {name: tensor for shard in weights.shards() for name, tensor in shard}

    first, again = made(), made()
    assert all(same(first[name], again[name]) for name in first)
    part = DummyWeights(CONFIG, "cpu").shards(wanted=lambda name: name.startswith("layers.4."))
    ((*tensors,),) = part
    assert all(same(tensor, first[name]) for name, tensor in tensors)
    assert not same(first["layers.0.attn.wkv.weight"], first["layers.1.attn.wkv.weight"])


def test_dummy_weights_keep_activations_near_one():
    weights = DummyWeights(CONFIG, "cpu")
    for shard in weights.shards():
        for name, data in shard:
            if data.ndim != 2 or not name.endswith(".weight") or name == "embed.weight":
                continue
            value = dequantize(data, weights.scale_of(name), (32, 32))
            gain = float(value.square().mean().sqrt()) * value.shape[1] ** 0.5
            assert 0.2 < gain < 2.5, name


def test_without_a_terminal_progress_is_told_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(
        "workers.models.deepseek_v41.loading.load_progress.time.monotonic", lambda: now
    )
    lines: list[str] = []
    with load_progress("Weights", lines.append) as progress:
        progress(10, 10**11)
        now += 6
        progress(3 * 10**10, 10**11)
        progress(4 * 10**10, 10**11)
        now += 6
        progress(10**11, 10**11)
    assert lines == ["Weights: 30 % of 100.0 GB", "Weights: 100 % of 100.0 GB"]
