"""The forward pass against numbers that two independent implementations agree on."""

import pytest
import torch

from workers.models.deepseek_v41.attention import attention, indexer
from workers.models.deepseek_v41.moe import moe

TOLERANCE = 1e-3
LENGTHS = (37, 130, 300)


def check(driver, golden, key, prompt, logits, steps=32):
    """The prompt's last rows, then decode steps, against the golden values under `key`."""
    torch.testing.assert_close(logits[-16:], golden[f"{key}.logits_last16"], atol=TOLERANCE, rtol=0)
    tokens, decoded = driver.continue_greedily(prompt, logits[-1], steps)
    expected = golden[f"{key}.decode_logits"][:steps]
    torch.testing.assert_close(decoded, expected, atol=TOLERANCE, rtol=0)
    assert tokens == golden[f"{key}.greedy"][:steps].tolist()


@pytest.mark.parametrize("model", ["v41_tiny", "v41_tiny_quant"])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_pass_and_decode_steps(make_driver, golden, model, length):
    driver, expected = make_driver(model), golden(model, "golden")
    prompt = driver.prompt(expected[f"p{length}.input_ids"])
    logits = driver.prefill(prompt)
    assert logits.shape == (length, 256)
    check(driver, expected, f"p{length}", prompt, logits)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(37, 1), (130, 1), *((length, chunk) for length in LENGTHS for chunk in (7, 33, 128))],
)
def test_chunked_prefill_is_one_pass(make_driver, golden, length, chunk):
    driver, expected = make_driver(), golden("v41_tiny", "golden")
    prompt = driver.prompt(expected[f"p{length}.input_ids"])
    check(driver, expected, f"p{length}", prompt, driver.prefill(prompt, chunk), steps=4)


def test_a_batch_does_not_change_a_sequence(make_driver, golden):
    driver, expected = make_driver(), golden("v41_tiny", "golden")
    prompts = [driver.prompt(expected[f"p{n}.input_ids"], slot) for slot, n in enumerate(LENGTHS)]
    logits = driver.step([p.chunk(0, len(p.ids)) for p in prompts])
    last = []
    for length, rows in zip(LENGTHS, logits.split(LENGTHS), strict=True):
        wanted = expected[f"p{length}.logits_last16"]
        torch.testing.assert_close(rows[-16:], wanted, atol=TOLERANCE, rtol=0)
        last.append(rows[-1])
    for step in range(32):
        for length, row in zip(LENGTHS, last, strict=True):
            wanted = expected[f"p{length}.decode_logits"][step]
            torch.testing.assert_close(row, wanted, atol=TOLERANCE, rtol=0)
        tokens = {
            p.slot: (int(row.argmax()), len(p.ids) + step)
            for p, row in zip(prompts, last, strict=True)
        }
        assert [t for t, _ in tokens.values()] == [
            int(expected[f"p{n}.greedy"][step]) for n in LENGTHS
        ]
        last = list(driver.decode(tokens))


def test_work_cut_into_pieces_to_bound_memory_is_the_same(make_driver, golden, monkeypatch):
    monkeypatch.setattr(indexer, "_PRODUCT_ELEMENTS", 5000)
    monkeypatch.setattr(indexer, "_SCORE_ELEMENTS", 3000)
    monkeypatch.setattr(indexer, "_TILE_PAGES", 1)
    monkeypatch.setattr(attention, "_KEY_ELEMENTS", 30000)
    monkeypatch.setattr(moe, "_TILE_WEIGHTS", 2 * 96 * 32)
    driver, expected = make_driver(), golden("v41_tiny", "golden")
    prompts = [driver.prompt(expected[f"p{n}.input_ids"], slot) for slot, n in enumerate(LENGTHS)]
    logits = driver.step([p.chunk(0, len(p.ids)) for p in prompts])
    last = [rows[-1] for rows in torch.split(logits, LENGTHS)]
    tokens = {p.slot: (int(row.argmax()), len(p.ids)) for p, row in zip(prompts, last, strict=True)}
    decoded = driver.decode(tokens)
    for length, first, second in zip(LENGTHS, last, decoded, strict=True):
        wanted = expected[f"p{length}.decode_logits"]
        torch.testing.assert_close(first, wanted[0], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(second, wanted[1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("stores_prefixes", [False, True], ids=["short rings", "long rings"])
@pytest.mark.parametrize("chunk", [1000, 64, 7])
@pytest.mark.parametrize("length", [37, 300])
def test_bounded_replay(make_driver, golden, chunk, length, stores_prefixes):
    driver = make_driver(keep_tokens=24, stores_prefixes=stores_prefixes)
    prompt = driver.prompt(golden("v41_tiny", "golden")[f"p{length}.input_ids"])
    logits = driver.prefill(prompt, chunk)
    assert len(logits) == 24  # the decoder layers ran on no other row
    check(driver, golden("v41_tiny", "golden_replay"), f"p{length}.keep24", prompt, logits, 20)


@pytest.mark.parametrize("length", LENGTHS)
def test_bounded_replay_of_the_quantised_model(make_driver, golden, length):
    driver, expected = (
        make_driver("v41_tiny_quant", keep_tokens=24),
        golden("v41_tiny_quant", "golden"),
    )
    prompt = driver.prompt(expected[f"p{length}.input_ids"])
    check(driver, expected, f"p{length}.keep24", prompt, driver.prefill(prompt, 50), 8)


def test_bounded_replay_of_a_short_prompt_cuts_nothing(make_driver, golden):
    driver, expected = make_driver(keep_tokens=64), golden("v41_tiny", "golden")
    prompt = driver.prompt(expected["p37.input_ids"])
    check(driver, expected, "p37", prompt, driver.prefill(prompt, 10))


def test_compact_caches_round_as_the_model_was_trained(make_driver, golden):
    """Rounding turns float noise into visible steps, so only the choice of tokens is compared."""
    driver, expected = (
        make_driver("v41_tiny_quant", kv_dtype="auto"),
        golden("v41_tiny_quant", "golden_cacheq"),
    )
    assert driver.engine.info.layout.page_tensors[0].dtype == "uint8"
    prompt = driver.prompt(expected["p37.input_ids"])
    logits = driver.prefill(prompt)
    tokens, _ = driver.continue_greedily(prompt, logits[-1])
    same = sum(a == b for a, b in zip(tokens, expected["p37.greedy"].tolist(), strict=True))
    assert same >= 24
    plain = golden("v41_tiny_quant", "golden")["p37.logits_last16"]
    assert (logits[-16:] - plain).abs().max() > 1  # the rounding is there
    assert (logits[-16:] - expected["p37.logits_last16"]).abs().mean() < 0.3
