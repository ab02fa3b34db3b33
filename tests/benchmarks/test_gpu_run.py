"""One command measures all that is claimed about a GPU; what fails does not keep the rest from running."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part, make_parts
from benchmarks.servers import served_options
from daemon.configuration.config import InstanceConfig

PART = """
import sys, time
kind, file = sys.argv[1:]
open(file, "w").write(kind)
time.sleep(60 if kind == "slow" else 0)
sys.exit(3 if kind == "bad" else 0)
"""


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """parts(kinds): these are what is to be measured."""
    (tmp_path / "part_of_test.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def measure(*kinds: str) -> None:
        monkeypatch.setattr(
            gpu,
            "make_parts",
            lambda out, *_: [
                Part(kind, ("part_of_test", kind, str(out / kind)), out / kind) for kind in kinds
            ],
        )

    return measure


def test_all_parts_run_whatever_becomes_of_one(parts, tmp_path, capsys):
    parts("bad", "slow", "good")
    assert gpu.main(out=tmp_path / "out", minutes=0.02) == 1
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"bad", "slow", "good"}
    shown = capsys.readouterr().out
    assert "exit code 3" in shown
    assert "took too long" in shown


def test_parts_can_be_chosen(parts, tmp_path):
    parts("bad", "good")
    assert gpu.main(out=tmp_path / "out", only=[2]) == 0
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["good"]


def test_what_is_measured_are_options_and_models_that_exist(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    measured = make_parts(tmp_path, models, v41_layers=18, repeats=3)
    assert [part.command[0] for part in measured] == [
        "daemon.cli.main",
        "benchmarks.prefix.ttft",
        "benchmarks.prefix.ttft",
    ]
    for part in measured[1:]:
        given = dict(zip(part.command[1::2], part.command[2::2], strict=True))
        options = served_options(given["--serve"])
        assert options.keys() <= set(InstanceConfig.__dataclass_fields__)
        longest = int(given["--prefix-tokens"]) + int(given["--new-tokens"])
        assert int(str(options["max_model_len"])) > longest
        json.loads(str(options.get("hf_overrides", "{}")))
        assert (gpu.Path(given["--model"]) / "config.json").exists()
