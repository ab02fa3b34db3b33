"""What an engine is made of, by its settings, and what is refused."""

from pathlib import Path

import pytest
import torch

from workers.contract import ModelLoadError, StepPlan
from workers.engine.trial_steps import heaviest_steps
from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.loading import network
from workers.models.deepseek_v41.loading.placing import WeightLoader, weight_bytes
from workers.models.deepseek_v41.model.model import DeepseekV41
from workers.models.deepseek_v41.moe.experts import Experts
from workers.models.deepseek_v41.weights.checkpoint import open_checkpoint
from workers.models.deepseek_v41.weights.dummy import DummyWeights

DATA = Path(__file__).parents[2] / "data"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "changes", "kind"),
    [
        ("v41_tiny", {"kv_dtype": "auto"}, "float32"),
        ("v41_tiny", {"kv_dtype": "auto", "dtype": "bfloat16"}, "bfloat16"),
        ("v41_tiny", {"kv_dtype": "bf16"}, "bfloat16"),
        ("v41_tiny", {"kv_dtype": "compact"}, "uint8"),
        ("v41_tiny_quant", {"kv_dtype": "auto"}, "uint8"),
        ("v41_tiny_quant", {"kv_dtype": "float32"}, "float32"),
    ],
)
def test_the_kv_dtype_decides_what_a_page_holds(new_driver, model, changes, kind):
    layout = new_driver(model, **changes).engine.info.layout
    assert {t.dtype for t in layout.page_tensors} == {kind}


@pytest.mark.parametrize("model", ["v41_tiny", "v41_tiny_quant"])
def test_random_weights_of_an_altered_shape_run(new_driver, model):
    driver = new_driver(
        model,
        load_format="dummy",
        kv_dtype="auto",
        hf_overrides={"n_routed_experts": 3, "sliding_window": 9},
    )
    prompt = driver.prompt(range(3, 60))
    logits = driver.prefill(prompt, 20)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 100
    tokens, _ = driver.continue_greedily(prompt, logits[-1], 3)
    assert len(tokens) == 3


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 64,
    "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32, "index_n_heads": 4,
    "index_head_dim": 32, "n_routed_experts": 8, "moe_intermediate_size": 64, "engram_head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize("layers", [2, 4, 18])
def test_the_released_model_runs_cut_to_some_layers(new_driver, layers):
    """With any tokenizer, since the weights are random; here there is none."""
    driver = new_driver(
        "v41_released",
        load_format="dummy",
        kv_dtype="auto",
        keep_tokens=140,
        hf_overrides={"num_hidden_layers": layers, **SMALL},
    )
    assert len(driver.network.layers) == layers
    prompt = driver.prompt(range(3, 303))
    logits = driver.prefill(prompt, 200)
    assert len(logits) == 140
    tokens, decoded = driver.continue_greedily(prompt, logits[-1], 5)
    assert decoded.isfinite().all()
    assert len(tokens) == 5 and max(tokens) < 512


def test_a_cut_model_needs_random_weights(new_driver):
    with pytest.raises(ModelLoadError, match=r"4 layers, .* are of 10: .*--load-format dummy"):
        new_driver(hf_overrides={"num_hidden_layers": 4})


def test_the_heaviest_steps_run(make_driver):
    """They are what a GPU's memory is planned with; all of their pages are page 0."""
    driver = make_driver(keep_tokens=24, stores_prefixes=True)
    engine = driver.engine
    for plan in heaviest_steps(engine.info, 64):
        result = engine.launch(plan).collect()
        assert len(result.tokens) == len(plan.prompts) + len(plan.decodes)


def test_a_placeholder_step_yields_nothing(make_driver):
    result = make_driver().engine.launch(StepPlan(77)).collect()
    assert (result.step, result.tokens.tolist()) == (77, [])


def test_a_replay_shorter_than_the_window_is_refused(new_driver):
    with pytest.raises(ModelLoadError, match="must be at least 16"):
        new_driver(keep_tokens=10)


def test_a_pool_without_room_for_a_page_is_refused(new_driver):
    with pytest.raises(ModelLoadError, match="one page"):
        new_driver(kv_cache_gb=1e-6)


def test_a_pool_too_small_for_the_context_shortens_it(new_driver):
    info = new_driver(kv_cache_gb=2.5 * 98304 / 1e9).engine.info
    assert (info.num_pages, info.max_model_len) == (2, 256)


def test_the_fingerprint_follows_weights_and_numbers(new_driver):
    def fingerprint(*args, **changes):
        return new_driver(*args, **changes).engine.info.layout.fingerprint

    prints = [
        fingerprint(),
        fingerprint(load_format="dummy"),
        fingerprint("v41_tiny_quant"),
        fingerprint(kv_dtype="bf16"),
        fingerprint(keep_tokens=24),
        fingerprint(dtype="bfloat16"),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(max_num_seqs=2, stores_prefixes=True) == prints[0]


def test_bfloat16_stays_near(new_driver, golden):
    """So small a random model amplifies rounding: only correlation can be asked for."""
    driver = new_driver("v41_tiny_quant", dtype="bfloat16", kv_dtype="bf16")
    expected = golden("v41_tiny_quant", "golden")
    logits = driver.prefill(driver.prompt(expected["p130.input_ids"]))[-16:]
    both = torch.stack((logits.flatten(), expected["p130.logits_last16"].flatten()))
    assert torch.corrcoef(both)[0, 1] > 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["v41_tiny", "v41_tiny_quant"])
def test_the_bytes_of_the_weights_are_known_before_they_are_loaded(name, dtype):
    config = read_config(DATA / name)
    for source in (open_checkpoint(DATA / name, config), DummyWeights(config, CPU)):
        model = DeepseekV41(config, dtype, CPU)
        expected = weight_bytes(model, source, dtype)
        WeightLoader(model, source, dtype, CPU).load()
        found = sum(parameter.nbytes for parameter in model.parameters())
        for module in model.modules():
            if isinstance(module, Experts):
                found += sum(stack.nbytes for stack in module._stacks.values())
        assert found == expected


def test_the_released_model_needs_more_than_one_device_has():
    config = read_config(DATA / "v41_released")
    model = DeepseekV41(config, torch.bfloat16, CPU)
    needed = weight_bytes(model, DummyWeights(config, CPU), torch.bfloat16)
    assert round(needed / 2**30) == 285


@pytest.mark.parametrize(
    ("changes", "advice"),
    [({}, "smaller dtype"), ({"load_format": "dummy"}, "num_hidden_layers")],
)
def test_weights_that_do_not_fit_are_refused_before_any_is_read(
    new_driver, monkeypatch, changes, advice
):
    monkeypatch.setattr(network, "free_memory", lambda device: 6 << 20)
    monkeypatch.setattr(network, "WeightLoader", None)  # not to be called
    said = rf"v41_tiny need 0\.0 GiB on cpu.* 0\.0 GiB are free there: .*{advice}"
    with pytest.raises(ModelLoadError, match=said):
        new_driver(**changes)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "v41_tiny need .* GiB are free there"),
        (
            RuntimeError("CUDA error: odd\nmore"),
            "v41_tiny cannot be loaded to cpu: CUDA error: odd$",
        ),
        (OSError(5, "Input/output error"), "cannot be loaded to cpu: .*Input/output error"),
    ],
)
def test_loading_that_fails_is_told_in_one_sentence(new_driver, monkeypatch, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(WeightLoader, "_put", fail)
    with pytest.raises(ModelLoadError, match=said):
        new_driver()
