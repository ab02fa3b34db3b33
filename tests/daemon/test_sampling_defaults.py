"""What generation_config.json says of sampling reaches the frontends, and nothing that it does not say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from daemon.configuration.config import InstanceConfig
from daemon.errors import EXIT_USAGE, ConfigurationError
from daemon.instance.role_settings import child_specs, make_plan
from daemon.instance.sampling_defaults import read_sampling_defaults
from frontend.settings import FrontendSettings, SamplingDefaults

NEUTRAL = SamplingDefaults(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
)  # fmt: skip


@pytest.fixture
def written(tmp_path: Path):
    """A model directory with this generation_config.json."""

    def write(content: object) -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "generation_config.json").write_text(text)
        return tmp_path

    return write


def test_all_values_are_read(written) -> None:
    values = dict(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)
    model_dir = written({"do_sample": True, "eos_token_id": [1, 2], "max_length": 9, **values})
    assert read_sampling_defaults(model_dir, "model") == SamplingDefaults(**values)
    assert read_sampling_defaults(model_dir, "openai") == NEUTRAL


@pytest.mark.parametrize("content", [{}, {"eos_token_id": 2}, {"top_k": None}, {"top_p": 1}])
def test_what_the_file_does_not_name_stays_neutral(written, content) -> None:
    """Nor do transformers' own values apply: top_k 50, and greedy where do_sample is absent."""
    assert read_sampling_defaults(written(content), "model") == NEUTRAL


def test_no_file(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, "model") == NEUTRAL


def test_a_model_that_does_not_sample_is_greedy(written) -> None:
    model_dir = written({"do_sample": False, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.3})
    assert read_sampling_defaults(model_dir, "model") == SamplingDefaults(
        temperature=0.0, repetition_penalty=1.3
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": "0.1"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": "no"}, "do_sample"),
    ],
)
def test_unusable_values_are_a_usage_error_that_names_them(written, content, told) -> None:
    model_dir = written(content)
    with pytest.raises(ConfigurationError) as caught:
        make_plan(InstanceConfig(), model_dir, model_dir, os.getpid())
    assert caught.value.exit_code == EXIT_USAGE
    for part in (told, str(model_dir), "--sampling-defaults openai"):
        assert part in str(caught.value)
    make_plan(InstanceConfig(sampling_defaults="openai"), model_dir, model_dir, os.getpid())


def test_every_frontend_is_told(written) -> None:
    model_dir = written({"temperature": 0.2, "top_p": 0.9})
    plan = make_plan(InstanceConfig(frontends=2), model_dir, model_dir, os.getpid())
    told = [
        msgspec.json.decode(spec.settings, type=FrontendSettings).sampling_defaults
        for spec in child_specs(plan, 0, ())
        if spec.role == "frontend"
    ]
    assert told == [SamplingDefaults(temperature=0.2, top_p=0.9)] * 2
