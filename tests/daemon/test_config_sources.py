"""Flags, environment and TOML: who wins, what is refused, and what `config show` says of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from cyclopts import App
from cyclopts.exceptions import CycloptsError

from daemon.configuration.config import DEFAULT_MODEL, InstanceConfig, read_overrides
from daemon.configuration.sources import (
    Environment,
    InstanceFile,
    ModelDirVariable,
    Provenance,
    ignored_variables,
)
from daemon.default_model.fetch import DEFAULT_MODEL_NAME


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
        environment = (Environment("DEEPINFER_", command=False), ModelDirVariable())
        app = App(config=(*environment, InstanceFile(tmp_path), origins))

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
    assert parse("--model", "/c")[0].model == "/c"


def test_the_other_variable_is_told_as_the_origin_and_in_the_help(parse, monkeypatch, tmp_path):
    (tmp_path / "default.toml").write_text('model = "/from/file"\n')
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "/a")
    config, origins = parse()
    assert config.model == "/a"
    assert origins.origin("model") == "environment DEEPINFER_HF_MODEL_DIR"
    help_text = command("serve", "--help").stdout
    assert help_text.count("DEEPINFER_MODEL,") + help_text.count("DEEPINFER_MODEL]") == 1
    assert "$DEEPINFER_HF_MODEL_DIR" in help_text


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


@pytest.mark.parametrize("key", ["hf_overrides", "hf-overrides"])
def test_overrides_may_be_a_table(parse, tmp_path, key):
    text = f'[{key}]\nnum_hidden_layers = 2\n[{key}.rope]\ntype = "x"\n'
    (tmp_path / "default.toml").write_text(text)
    wanted = {"num_hidden_layers": 2, "rope": {"type": "x"}}
    assert read_overrides(parse()[0].hf_overrides) == wanted
    (tmp_path / "default.toml").write_text(f"{key} = '{{\"num_hidden_layers\": 3}}'\n")
    assert read_overrides(parse()[0].hf_overrides) == {"num_hidden_layers": 3}


@pytest.mark.parametrize("content", [b"max_waiting = \n", b"model = '\xff'\n"])
def test_a_file_that_is_no_toml_is_named(parse, tmp_path, content):
    (tmp_path / "default.toml").write_bytes(content)
    with pytest.raises(CycloptsError) as caught:
        parse()
    assert str(caught.value).startswith(f"The configuration file {tmp_path}/default.toml is no")


def test_a_variable_that_is_no_option_is_told_with_the_nearest_one():
    names = (
        "DEEPINFER_MAX_WAITNG", "DEEPINFER_PORT", "DEEPINFER_HF_MODEL_DIR", "DEEPINFER_XYZZY", "PATH",
    )  # fmt: skip
    found = ignored_variables(dict.fromkeys(names, "1"))
    assert len(found) == 2
    assert "DEEPINFER_MAX_WAITNG is ignored" in found[0]
    assert found[0].endswith("did you mean DEEPINFER_MAX_WAITING?")
    assert found[1].endswith("no option.")


OF_KUBERNETES = {
    "DEEPINFER_PORT": "tcp://10.96.14.7:8888",
    "DEEPINFER_PORT_8888_TCP": "tcp://10.96.14.7:8888",
    "DEEPINFER_PORT_8888_TCP_ADDR": "10.96.14.7",
    "DEEPINFER_PORT_8888_TCP_PORT": "8888",
    "DEEPINFER_PORT_8888_TCP_PROTO": "tcp",
    "DEEPINFER_SERVICE_HOST": "10.96.14.7",
    "DEEPINFER_SERVICE_PORT": "8888",
    "DEEPINFER_SERVICE_PORT_HTTP": "8888",
    "DEEPINFER_GPU_PORT": "tcp://10.96.14.8:8888",
    "DEEPINFER_GPU_SERVICE_HOST": "10.96.14.8",
}


def test_what_kubernetes_sets_for_a_service_is_no_option(parse, monkeypatch, tmp_path):
    for name, value in OF_KUBERNETES.items():
        monkeypatch.setenv(name, value)
    config, origins = parse()
    assert (config, origins.origin("port")) == (InstanceConfig(), "default")
    (tmp_path / "default.toml").write_text("port = 9000\n")
    assert parse()[0].port == 9000
    (sentence,) = ignored_variables(OF_KUBERNETES)
    assert "Kubernetes" in sentence and "enableServiceLinks" in sentence
    assert all(name in sentence for name in OF_KUBERNETES)
    monkeypatch.setenv("DEEPINFER_PORT", "9001")
    assert parse()[0].port == 9001


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_part_of_a_file(parse, tmp_path, newline):
    text = newline.join(("max_waiting = 3", "served_model_name = 'm'", ""))
    (tmp_path / "default.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    config = parse()[0]
    assert (config.max_waiting, config.served_model_name) == (3, "m")


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("serve", "--model", b"/models/caf\xe9"), {}),
        (("serve", "--served-model-name", b"caf\xe9"), {}),
        (("start", "--run-dir", b"/tmp/caf\xe9"), {}),
        (("status", "--run-dir", b"/tmp/caf\xe9"), {}),
        (("serve",), {"DEEPINFER_MODEL": b"/models/caf\xe9"}),
    ],
)
def test_what_is_not_utf8_ends_in_a_sentence(words, variables):
    ended = command(*words, succeeds=False, **variables)
    assert ended.returncode == 2
    assert ended.stderr.startswith("deepinfer: The ")
    assert "caf\\xe9' is not UTF-8:" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["serve", "start"])
def test_a_slip_in_a_variable_is_told_at_the_start(tmp_path, name):
    words = (name, "--run-dir", str(tmp_path / "r"), "--model", str(tmp_path / "none"))
    ended = command(*words, succeeds=False, DEEPINFER_DPP="2")
    first = ended.stderr.splitlines()[0]
    assert first.endswith("DEEPINFER_DPP is ignored, it is no option: did you mean DEEPINFER_DP?")


def command(
    *words: str | bytes, succeeds: bool = True, **variables: str | bytes
) -> subprocess.CompletedProcess[str]:
    """A command with this environment and no more."""
    return subprocess.run(
        [sys.executable, "-m", "daemon.cli.main", *words],
        capture_output=True, text=True, check=succeeds, env={"PATH": "/usr/bin", **variables},
    )  # fmt: skip


def test_config_show_cuts_no_value(tmp_path):
    long = "/models/" + "x" * 150
    piped = command("config", "show", "--model", long).stdout.splitlines()
    assert any(line.split() == ["--model", long, "flag", "--model"] for line in piped)
    narrow = command("config", "show", "--model", long, COLUMNS="60").stdout
    assert "…" not in narrow
    assert sum(line.count("x" * 10) for line in narrow.splitlines()) >= 10
    assert max(map(len, narrow.splitlines())) <= 60


def test_config_show_as_json():
    shown = json.loads(command("config", "show", "--json", "--run-dir", "/x", "--dp", "3").stdout)
    assert set(shown) == {field.name for field in dataclasses.fields(InstanceConfig)}
    assert shown["dp"] == {"value": 3, "from": "flag --dp"}
    assert shown["run_dir"] == {"value": "/x", "from": "flag --run-dir"}
    assert shown["max_model_len"] == {"value": None, "from": "default"}


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
