"""Flags, environment and TOML: who wins, what is refused, and what `config show` says of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from cyclopts import App
from cyclopts.config import Env
from cyclopts.exceptions import CycloptsError

from daemon.config import DEFAULT_MODEL, InstanceConfig
from daemon.config_sources import InstanceFile, Provenance
from daemon.default_model import DEFAULT_MODEL_NAME


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No option of the machine that runs the tests."""
    for field in dataclasses.fields(InstanceConfig):
        monkeypatch.delenv("DEEPINFER_" + field.name.upper(), raising=False)
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)


@pytest.fixture
def parse(tmp_path):
    """Parses a command line; `tmp_path` stands for /etc/deepinfer."""

    def run(*tokens: str) -> tuple[InstanceConfig, Provenance]:
        origins = Provenance()
        app = App(config=(Env("DEEPINFER_", command=False), InstanceFile(tmp_path), origins))

        @app.default
        def take(config: InstanceConfig | None = None) -> InstanceConfig:
            return config or InstanceConfig()

        config = app(
            list(tokens), exit_on_error=False, print_error=False, result_action="return_value"
        )
        return config, origins

    return run


def test_without_anything_the_defaults_hold(parse):
    config, origins = parse()
    assert config == InstanceConfig()
    assert origins.origin("port") == "default"


def test_flag_beats_environment_beats_file_beats_default(parse, tmp_path, monkeypatch):
    (tmp_path / "default.toml").write_text("port = 1\ndp = 2\ntokenizers = 3\n")
    monkeypatch.setenv("DEEPINFER_PORT", "10")
    monkeypatch.setenv("DEEPINFER_DP", "20")
    config, origins = parse("--port", "100")
    assert (config.port, config.dp, config.tokenizers, config.frontends) == (100, 20, 3, 1)
    assert origins.origin("port") == "flag --port"
    assert origins.origin("dp") == "environment DEEPINFER_DP"
    assert origins.origin("tokenizers") == f"file {tmp_path / 'default.toml'}"
    assert origins.origin("frontends") == "default"


def test_the_instance_chooses_its_file(parse, tmp_path, monkeypatch):
    (tmp_path / "pe.toml").write_text('max-model-len = 4096\nrouting = "least-loaded"\n')
    config, _ = parse("--instance", "pe")
    assert (config.max_model_len, config.routing) == (4096, "least-loaded")
    monkeypatch.setenv("DEEPINFER_INSTANCE", "pe")
    assert parse()[0].max_model_len == 4096


def test_a_named_file_replaces_the_instances_own(parse, tmp_path):
    (tmp_path / "default.toml").write_text("dp = 7\n")
    other = tmp_path / "other"
    other.write_text("port = 5\n")
    config, _ = parse("--config", str(other))
    assert (config.dp, config.port) == (1, 5)


@pytest.mark.parametrize(
    ("variables", "model"),
    [
        ({"DEEPINFER_HF_MODEL_DIR": "/a"}, "/a"),
        ({"DEEPINFER_MODEL": "/b"}, "/b"),
        ({"DEEPINFER_HF_MODEL_DIR": "/a", "DEEPINFER_MODEL": "/b"}, "/b"),
        ({}, DEFAULT_MODEL_NAME),
    ],
)
def test_two_variables_name_the_model(parse, monkeypatch, variables, model):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse()[0].model == model


def test_the_default_has_one_name():
    assert DEFAULT_MODEL == DEFAULT_MODEL_NAME


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (["--port", "65536"], "65535"),
        (["--dp", "0"], ">= 1"),
        (["--gpu-memory-utilization", "1.5"], "1"),
        (["--dtype", "int3"], "bfloat16"),
        (["--max-waiting", "many"], "many"),
        (["--instance", "a/b"], "instance name"),
        (["--instance", ".."], "instance name"),
        (["--instance", "-x"], "--instance"),
        (["--instance", "é"], "instance name"),
        (["--instance", "a" * 65], "64 characters"),
        (["--instance", "a\n"], "instance name"),
        (["--nonsense", "1"], "--nonsense"),
        (["stray"], "stray"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_wrong_values_are_refused_with_their_name(parse, tokens, told):
    with pytest.raises(CycloptsError) as caught:
        parse(*tokens)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [("prot = 1", "prot"), ("port = = 1", "TOML"), ('port = "x"', "port"), ("dp = 0", "dp")],
)
def test_a_wrong_file_is_refused(parse, tmp_path, text, told):
    (tmp_path / "default.toml").write_text(text)
    with pytest.raises(CycloptsError) as caught:
        parse()
    assert told.lower() in str(caught.value).lower()


def test_config_show_lists_every_option_with_its_origin(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("dp = 3\n")
    shown = subprocess.run(
        [sys.executable, "-m", "daemon.cli.main", "config", "show", "--config", str(file)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin", "COLUMNS": "200", "DEEPINFER_PORT": "9"},
    ).stdout
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.splitlines()[1:]}
    assert set(rows) == {
        "--" + field.name.replace("_", "-") for field in dataclasses.fields(InstanceConfig)
    }
    assert rows["--dp"].split(maxsplit=1) == ["3", f"file {file}"]
    assert rows["--port"].split() == ["9", "environment", "DEEPINFER_PORT"]


def test_a_usage_error_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "daemon.cli.main", "serve", "--dp", "zero"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--dp" in done.stderr
