"""The model that serves a checkpoint follows from its `config.json`."""

import json

import pytest

from transport.model_files import ModelError
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
    ],
)
def test_the_model_type_chooses(tmp_path, config, module):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_loader(tmp_path) is module.load


def test_a_directory_without_a_configuration_is_left_to_transformers_to_refuse(tmp_path):
    assert model_loader(tmp_path) is hf.load


@pytest.mark.parametrize(
    "text", ["{", "", "[1]", "[" * 100_000, '{"num_hidden_layers": 1000000000}']
)
def test_what_no_implementation_can_use_is_refused_here(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        model_loader(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
