"""The model that serves a checkpoint follows from its `config.json`."""

import json

import pytest

from workers.models.deepseek_v41.loading import loader as deepseek_v41
from workers.models.hf import model as hf
from workers.models.registry import model_loader


@pytest.mark.parametrize(
    ("config", "module"),
    [
        ({"model_type": "deepseek_v41"}, deepseek_v41),
        ({"model_type": "deepseek_v41_text"}, deepseek_v41),
        ({"model_type": "llama"}, hf),
        ({}, hf),
        ([1], hf),
    ],
)
def test_the_model_type_chooses(tmp_path, config, module):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_loader(tmp_path) is module.load


@pytest.mark.parametrize("text", [None, "{", ""])
def test_what_cannot_be_read_is_left_to_transformers_to_refuse(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert model_loader(tmp_path) is hf.load
