"""Engram row ids: golden numbers, chunks, batches, borders."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from transport.model_files import ModelError
from workers.contract import ModelLoadError
from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.engram.hashing import BORDER, EngramHash, hash_constants
from workers.models.deepseek_v41.engram.token_map import load_token_map, token_map_from_tokenizer

TINY = Path(__file__).parents[2] / "data" / "v41_tiny"
CONFIG = read_config(TINY)
TOKEN_MAP = load_token_map(TINY, CONFIG)
HASH = EngramHash(CONFIG, TOKEN_MAP)
START = torch.full((3,), BORDER)


def rows_of(tokens: torch.Tensor, hasher: EngramHash = HASH) -> torch.Tensor:
    return hasher.row_ids(torch.cat([START, hasher.compressed_ids(tokens)]))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(TINY / "golden.safetensors")


def test_constants_of_the_fixture(golden):
    constants = hash_constants(CONFIG)
    for name in ("multipliers", "primes", "offsets"):
        assert torch.equal(getattr(constants, name), golden[f"engram.{name}"]), name


def test_constants_of_the_released_model():
    config = read_config(TINY.with_name("v41_released"))
    constants = hash_constants(config)
    assert constants.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert constants.primes[:, 0, :3].tolist()[0] == [16000057, 16000079, 16000081]
    assert constants.primes[0, 2, 7] == 16000463
    assert (constants.primes[1, 0, 0], constants.primes[1, 2, 7]) == (16000477, 16000889)


@pytest.mark.parametrize("length", [37, 130, 300])
def test_rows_of_the_golden_prompts(golden, length):
    rows = rows_of(golden[f"p{length}.input_ids"])
    assert torch.equal(rows, golden[f"p{length}.engram_hash_ids"])


tokens = st.lists(st.integers(0, 255), min_size=1, max_size=24).map(torch.tensor)


@given(tokens, st.data())
@settings(deadline=None)
def test_any_split_into_chunks_gives_the_same_rows(ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    compressed = torch.cat([START, HASH.compressed_ids(ids)])
    parts = [p for p in (compressed[: cut + 3], compressed[cut:]) if len(p) > 3]
    assert torch.equal(torch.cat([HASH.row_ids(p) for p in parts]), HASH.row_ids(compressed))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32))
@settings(deadline=None)
def test_a_batch_is_its_rows(batch, length, seed):
    ids = torch.randint(0, 97, (batch, length + 3), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(HASH.row_ids(ids), torch.stack([HASH.row_ids(row) for row in ids]))


@given(tokens)
@settings(deadline=None)
def test_rows_stay_inside_their_head(ids):
    constants = hash_constants(CONFIG)
    local = rows_of(ids) - constants.offsets
    assert (local >= 0).all()
    assert (local < constants.primes.flatten(1)).all()


def test_an_image_token_ends_the_look_back_like_the_start():
    hasher = EngramHash(replace(CONFIG, image_token_id=200), TOKEN_MAP)
    after_image = rows_of(torch.tensor([17, 200, 40, 41]), hasher)
    alone = rows_of(torch.tensor([40, 41]), hasher)
    assert torch.equal(after_image[2:], alone)
    assert torch.equal(after_image[:1], rows_of(torch.tensor([17])))


def test_a_wrong_table_size_is_refused():
    with pytest.raises(ModelLoadError, match="engram_num_embeddings is 607 for layer 1"):
        hash_constants(replace(CONFIG, engram_num_embeddings=(607, 796)))


def byte_tokenizer() -> Tokenizer:
    """Byte-level like the real one: 'Ġ' is a space, 'Ã' and '©' are the two bytes of an é."""
    words = ["a", "A", "Ġa", "Ġ", "ĠĠ", "Ã", "©", "Ã©", "e", "Ċ", "b", "B"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<b>", special=True)])
    return tokenizer


def test_tokens_of_equal_normalised_text_share_an_id():
    config = replace(CONFIG, vocab_size=13, engram_compressed_vocab_size=7)
    token_map = token_map_from_tokenizer(byte_tokenizer(), config).tolist()
    #      a  A  _a _  __ Ã  ©  é  e  \n b  B  <b>
    assert token_map == [0, 0, 0, 1, 1, 2, 3, 4, 4, 1, 5, 5, 6]


def test_a_tokenizer_of_another_model_is_refused():
    config = replace(CONFIG, vocab_size=13, engram_compressed_vocab_size=8)
    with pytest.raises(ModelLoadError, match="gives 7 compressed ids"):
        token_map_from_tokenizer(byte_tokenizer(), config)


def test_a_directory_with_a_tokenizer_only(tmp_path):
    config = replace(CONFIG, vocab_size=13, engram_compressed_vocab_size=7)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    expected = token_map_from_tokenizer(byte_tokenizer(), config)
    assert torch.equal(load_token_map(tmp_path, config), expected)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("other.json", "", "no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("engram_token_map.json", "[", "is not valid JSON"),
        ("engram_token_map.json", "[0, 1]", "list of 256"),
        ("engram_token_map.json", json.dumps([97] * 256), "below 97"),
        (
            "engram_token_map.json",
            json.dumps([id % 96 for id in range(256)]),
            r"token_map\.json has 96 different .* engram_compressed_vocab_size is 97",
        ),
    ],
)
def test_a_directory_without_a_usable_map_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=said):
        load_token_map(tmp_path, CONFIG)
