"""`deepinfer bench engine`: bytes and operations of a step, classes of kernels, the report, and a run on a
CPU. With a GPU, `tests/daemon/test_bench_on_gpu.py` runs it there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from transformers import LlamaConfig, MixtralConfig

from daemon.cli.bench.engine import command
from daemon.cli.bench.engine.costs import LayerCosts, ModelCosts, Peaks, StepCosts
from daemon.cli.bench.engine.kernel_classes import KERNEL_CLASSES, kernel_class
from daemon.cli.bench.engine.measure import STEPS
from daemon.cli.bench.engine.model_costs import model_costs
from daemon.cli.bench.engine.report import (
    LONGEST_KERNELS,
    CaseFigures,
    ModelFigures,
    PeakFigures,
    Report,
    class_times,
    kernels,
    longest,
    roofline,
    show,
)
from daemon.cli.bench.engine.shapes import SHAPES
from daemon.cli.bench.engine.steps import Stepper
from daemon.cli.main import main
from hicache.layout import CacheLayout
from tests.support.engines import save_random_llama
from workers.contract import DecodeRow, EngineInfo
from workers.models.hf.loader import load_config
from workers.models.hf.page_layout import build_cache_layout, layer_shapes

ROOT = Path(__file__).parents[2]
PEAKS = Peaks(4e12, 800e12)


def layout_of(folder, dtype: str) -> CacheLayout:
    config = load_config(folder).config
    return build_cache_layout(layer_shapes(config), dtype, config, "")


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory) -> ModelCosts:
    folder = tmp_path_factory.mktemp("8b")
    (folder / "config.json").write_bytes(msgspec.json.encode(SHAPES["8b"]))
    costs = model_costs(folder, "bfloat16", layout_of(folder, "bfloat16"))
    assert costs is not None
    return costs


def test_llama_8b_by_hand(llama_8b):
    in_layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    head, norms = 128_256 * 4096, 65 * 4096
    assert llama_8b.linear_parameters == in_layers
    assert llama_8b.head_parameters == head
    assert llama_8b.weight_bytes == 2 * (in_layers + head + norms)
    assert round(llama_8b.weight_bytes / 1e9, 1) == 15.0
    assert llama_8b.kv_bytes == 2 * 32 * 8 * 128 * 2 == 131_072
    assert round(llama_8b.token_flops / 1e9, 2) == 13.96


def test_a_decode_of_llama_8b_by_hand(llama_8b):
    step = llama_8b.decode(256, 1024)
    assert round(step.bytes / 1e9, 1) == 49.4
    # Scores and weighted sum of 32 heads of 128 in 32 layers, and the output layer for each sequence.
    attention = 4 * 32 * 128 * 32 * 1024
    assert step.flops == 256 * (13_958_643_712 + 2 * 525_336_576 + attention)


def test_a_prompt_of_llama_8b_by_hand(llama_8b):
    step = llama_8b.prefill(8192)
    assert step.bytes == llama_8b.weight_bytes + 8192 * 131_072
    pairs = 8192 * 8193 // 2
    assert step.flops == 8192 * 13_958_643_712 + 2 * 525_336_576 + 4 * 32 * 128 * 32 * pairs


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("start", [0, 2, 5, 40])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_pairs_and_keys_are_those_of_the_mask(window, start, tokens):
    seen = [
        {k for k in range(q + 1) if window is None or q - k < window}
        for q in range(start, start + tokens)
    ]
    layer = LayerCosts(1, 1, window)
    assert layer.pairs(start, tokens) == sum(map(len, seen))
    assert layer.keys(start, tokens) == len(set().union(*seen))


def test_a_table_that_is_the_output_layer_too_counts_once(tmp_path):
    config = dict(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2,
    )  # fmt: skip
    costs = []
    for tied in (True, False):
        LlamaConfig(**config, tie_word_embeddings=tied).save_pretrained(tmp_path)
        costs.append(model_costs(tmp_path, "float32", layout_of(tmp_path, "float32")))
    assert costs[0] == costs[1]
    assert costs[0].weight_bytes == 4 * (
        2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 256 * 64 + 5 * 64
    )


def test_a_mixture_of_experts_is_not_computed(tmp_path):
    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=2, num_hidden_layers=1, num_local_experts=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    assert model_costs(tmp_path, "float32", layout_of(tmp_path, "float32")) is None


def test_the_roofline_is_the_slower_of_bytes_and_operations():
    line = roofline(StepCosts(8e9, 80e9), PEAKS, ms=4.0)
    assert (line.ms, line.fraction, line.bound) == (2.0, 0.5, "memory")
    line = roofline(StepCosts(8e9, 8e12), PEAKS, ms=40.0)
    assert (line.ms, line.fraction, line.bound) == (10.0, 0.25, "compute")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("aten::addmm", "products"),
        ("_decode_kernel", "attention"),
        ("_plan_kernel", "attention"),
        ("_prefill_kernel", "attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<cutlass::bfloat16_t>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_store_kernel", "KV store"),
        ("aten::_index_put_impl_", "KV store"),
        ("_norm_kernel", "norms, rotary, gates"),
        ("_rotate_kernel", "norms, rotary, gates"),
        ("_gate_kernel", "norms, rotary, gates"),
        ("aten::mul", "norms, rotary, gates"),
        ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::direct_copy_kernel_cuda", "copies"),
        ("aten::cat", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "other"),
        ("aten::matmul", "other"),
    ],
)
def test_kernels_have_classes(name, expected):
    assert kernel_class(name) == expected


def test_every_kernel_of_ours_has_a_class():
    """One that is written later must not end among `other`."""
    launched = [
        name
        for path in (ROOT / "workers").rglob("triton/*.py")
        for name in re.findall(r"^ *(_\w+)\[", path.read_text(), re.MULTILINE)
    ]
    assert "_decode_kernel" in launched
    assert [name for name in launched if kernel_class(name) == "other"] == []


def test_kernels_are_per_step_and_each_class_keeps_its_longest():
    names = [f"gemm_{number}" for number in range(LONGEST_KERNELS + 3)]
    times = [(name, 100.0 - i, 4) for i, name in enumerate(names)]
    found = kernels([("_store_kernel", 2.0, 8), ("_norm_kernel", 0.0, 1), *times], steps=2)
    assert found[0].name == "gemm_0"
    assert (found[-1].kind, found[-1].ms, found[-1].launches) == ("KV store", 1.0, 4.0)
    assert [kernel.name for kernel in longest(found)] == [
        *names[:LONGEST_KERNELS],
        "_store_kernel",
    ]
    classes = class_times(found)
    assert list(classes) == list(KERNEL_CLASSES)
    assert classes["KV store"] == 1.0
    assert classes["attention"] == 0.0


def make_report(is_known: bool) -> Report:
    found = kernels([("nvjet_x[y]", 6.0, 2), ("_decode_kernel", 2.0, 2)], steps=2)
    case = CaseFigures(
        phase="decode", batch=64, context=1024, ms=5.0, launch_ms=0.5, tokens_per_second=12_800.0,
        roofline=roofline(StepCosts(16e9, 80e9), PEAKS, 5.0) if is_known else None,
        class_ms=class_times(found), kernels=longest(found),
    )  # fmt: skip
    return Report(
        "NVIDIA H200", "2.11", "some model", "bfloat16", PeakFigures(4000.0, 800.0),
        ModelFigures(15.0, 131_072, 13.96) if is_known else None, [case],
    )  # fmt: skip


def shown(report: Report) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        show(report, console)
    return capture.get()


def test_the_report_is_shown():
    text = shown(make_report(is_known=True))
    for words in ("4,000 GB/s", "decode 64 × 1,024", "12,800", "80 %", "memory", "75.0 %"):
        assert words in text
    assert "nvjet_x[y]" in text  # brackets are no markup
    assert re.search(r"^rest of the step +1\.000", text, re.MULTILINE)


def test_what_is_not_known_is_not_shown_as_a_number():
    text = shown(make_report(is_known=False))
    assert "not computed for this model" in text
    assert "%" not in text.split("TIME IN")[0]
    assert "5.00 ms" in text


@pytest.mark.parametrize("is_known", [True, False])
def test_the_plot_is_a_png(is_known):
    pytest.importorskip("matplotlib")
    from daemon.cli.bench.engine.plot import draw

    assert draw(make_report(is_known)).startswith(b"\x89PNG\r\n\x1a\n")


class Recorder:
    """An engine of a GPU's depth that notes its plans, and how many of its steps are under way."""

    info = EngineInfo(
        layout=CacheLayout(128, 1024, ()), num_pages=64, max_num_seqs=4, max_model_len=1024,
        vocab_size=100, eos_token_ids=(), pipeline_depth=1, device="none",
    )  # fmt: skip

    def __init__(self) -> None:
        self.plans = []
        self.under_way = []

    def launch(self, plan):
        self.plans.append(plan)
        self.under_way.append(self.under_way[-1] + 1 if self.under_way else 1)
        return self

    def collect(self):
        self.under_way.append(self.under_way[-1] - 1)


def test_decode_steps_overlap_and_go_on_where_the_one_before_ended():
    engine = Recorder()
    Stepper(engine).decode(batch=3, first=200, warm=2, steps=4)
    assert max(engine.under_way) == 2
    assert engine.under_way[-1] == 0
    assert [plan.step for plan in engine.plans] == [0, 1, 2, 3, 4, 5]
    for step, plan in enumerate(engine.plans):
        assert plan.decodes == tuple(DecodeRow(slot, 200 + step) for slot in range(3))
    first, *others = engine.plans
    assert not any(plan.arrivals for plan in others)
    for slot, chunk in enumerate(first.arrivals):
        assert (chunk.slot, chunk.start, len(chunk.tokens), len(chunk.history)) == (
            slot, 200, 1, 201,
        )  # fmt: skip
    pages = [page for chunk in first.arrivals for page in chunk.pages]
    assert len(set(pages)) == len(pages) == 3 * 2  # none shared; 206 tokens take two


def test_prompts_come_one_at_a_time():
    engine = Recorder()
    Stepper(engine).prefill(tokens=300, warm=1, steps=2)
    assert max(engine.under_way) == 1
    (chunk,) = engine.plans[-1].prompts
    assert (len(engine.plans), len(chunk.tokens), len(chunk.pages), chunk.sample) == (
        3,
        300,
        3,
        True,
    )


@pytest.mark.parametrize("counts", STEPS.values())
def test_the_timed_steps_have_the_context_asked_for_on_average(counts):
    for context in (100, 1024):
        first = counts.first_position(context)
        timed = range(first + counts.warm, first + counts.warm + counts.decode)
        assert sum(position + 1 for position in timed) / counts.decode == context
        assert counts.mean_context(first) == context


def run_main(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["deepinfer", "bench", "engine", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert run_main(monkeypatch, "--plot", "engine.png") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'deepinfer-serve[bench]'" in captured.err


@pytest.mark.parametrize("numbers", ["", "0", "1,,2", "many", "-1"])
def test_what_is_no_list_of_numbers_is_refused(monkeypatch, capsys, numbers):
    assert run_main(monkeypatch, f"--batch={numbers}") == 2
    assert "is no list of numbers such as 1,64,256" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("llama"), vocab_size=256)


def test_a_run_on_a_cpu(llama, tmp_path, capsys):
    path = tmp_path / "engine.json"
    command.engine(
        model=str(llama), accelerator="cpu", batch="1,2", context="16", prefill="24", json=path
    )
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert (report.device, report.dtype) == ("cpu", "float32")
    assert report.costs.kv_bytes_a_token == 2 * 2 * 2 * 16 * 4
    assert [(case.phase, case.batch, case.context) for case in report.cases] == [
        ("decode", 1, 16),
        ("decode", 2, 16),
        ("prefill", 1, 24),
    ]
    for case in report.cases:
        tokens = case.batch if case.phase == "decode" else case.context
        assert case.tokens_per_second == pytest.approx(tokens / case.ms * 1e3)
        assert case.roofline.fraction == pytest.approx(case.roofline.ms / case.ms)
        for name in ("products", "attention", "KV store", "norms, rotary, gates"):
            assert case.class_ms[name] > 0
    # Two layers of seven products and the output layer, whatever the batch.
    decode = report.cases[0]
    products = [kernel for kernel in decode.kernels if kernel.name == "aten::mm"]
    assert products[0].launches >= 15
    assert "written to" in capsys.readouterr().out


def test_contexts_that_memory_does_not_hold_are_refused_with_a_sentence(
    monkeypatch, capsys, llama, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workers.engine.pool_sizing.host_pool_bytes", lambda *_: 128 * 512 * 4)
    assert (
        run_main(
            monkeypatch, "--model", str(llama), "--accelerator", "cpu", "--batch", "5",
            "--context", "64", "--prefill", "64",
        )
        == 2
    )  # fmt: skip
    error = capsys.readouterr().err
    assert "A decode of 5 sequences of" in error
    assert "takes 5 pages of KV, but the engine has 4" in error
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_loaded_is_a_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert run_main(monkeypatch, "--model", str(tmp_path), "--accelerator", "cpu") == 1
    error = capsys.readouterr().err
    assert "The engine cannot be measured" in error
    assert "Traceback" not in error
