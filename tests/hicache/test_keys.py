"""Keys of pages: equal for equal prefixes of one model and one tenant, different otherwise."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.keys import KEY_BYTES, prompt_keys

TOKENS = st.lists(st.integers(0, 200_000), max_size=40)


def keys(tokens: list[int], fingerprint: str = "model", salt: str = "", page_tokens: int = 4):
    return prompt_keys(
        np.array(tokens, np.int32), fingerprint=fingerprint, salt=salt, page_tokens=page_tokens
    ).keys


@given(TOKENS, TOKENS)
def test_keys_are_equal_exactly_as_far_as_the_prefixes_are(one, other):
    for at, (a, b) in enumerate(zip(keys(one), keys(other), strict=False), start=1):
        assert (a == b) == (one[: at * 4] == other[: at * 4])


@given(TOKENS)
def test_one_key_a_full_page(tokens):
    found = prompt_keys(np.array(tokens, np.int32), fingerprint="m", salt="", page_tokens=4)
    assert found.num_tokens == len(tokens)
    assert len(found.keys) == len(tokens) // 4
    assert all(len(key) == KEY_BYTES for key in found.keys)


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_another_model_or_tenant_shares_no_key(model, salt, other_model, other_salt):
    tokens = list(range(8))
    same = (model, salt) == (other_model, other_salt)
    assert (keys(tokens, model, salt) == keys(tokens, other_model, other_salt)) == same
    assert bool(set(keys(tokens, model, salt)) & set(keys(tokens, other_model, other_salt))) == same


def test_a_page_depends_on_its_place():
    assert len(set(keys([7] * 40))) == 10


def test_a_slice_of_an_array_hashes_as_its_values():
    tokens = np.arange(100, dtype=np.int32)
    assert (
        keys(tokens[10:50:2].tolist())
        == prompt_keys(tokens[10:50:2], fingerprint="model", salt="", page_tokens=4).keys
    )


def test_a_prompt_of_163_thousand_tokens():
    found = prompt_keys(
        np.arange(163_000, dtype=np.int32), fingerprint="m", salt="", page_tokens=128
    )
    assert len(set(found.keys)) == 1273
