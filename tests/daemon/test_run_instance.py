"""What `serve` leaves of an instance: its log, if it ended unexpectedly; else nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.configuration.config import InstanceConfig
from daemon.errors import DeepInferError
from daemon.instance import run_instance as module
from daemon.system.run_directory import LOG_FILE, not_running
from daemon.system.standard_output import StandardOutput
from daemon.system.stop_signals import StopSignals


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(becomes_ready, failure): the run directory of an instance that ended so."""

    def run_and_end(becomes_ready: bool, failure: Exception | None, **options) -> Path:
        run_dir = tmp_path / "run"

        class Instance:
            def __init__(self, _plan, _supervisor, _server, _port, _keys, on_ready) -> None:
                self._on_ready = on_ready

            def run(self, _signals: StopSignals) -> None:
                (run_dir / LOG_FILE).write_text("what happened")
                if becomes_ready:
                    self._on_ready("http://127.0.0.1:1")
                if failure is not None:
                    raise failure

        monkeypatch.setattr(module, "Instance", Instance)
        monkeypatch.setattr(module, "find_model", lambda _model, _tell: tmp_path)
        monkeypatch.setattr(module, "raise_descriptor_limit", lambda _config: None)
        config = InstanceConfig(
            run_dir=run_dir, port=0, engine="fake", accelerator="cpu", hicache_size_gb=0, **options
        )
        signals = StopSignals()
        try:
            module.run_instance(config, signals, StandardOutput())
        except type(failure) as error:
            assert error is failure
        finally:
            signals.close()
        return run_dir

    return run_and_end


@pytest.mark.parametrize("failure", [DeepInferError("it does not end"), ZeroDivisionError()])
def test_the_log_stays_after_an_unexpected_end_and_is_pointed_at(run, failure):
    run_dir = run(True, failure)
    assert [entry.name for entry in run_dir.iterdir()] == [LOG_FILE]
    assert f"The log of its last run is {run_dir / LOG_FILE}." in not_running(run_dir, "default")
    assert not run(True, None).exists()  # the next one ends in order


@pytest.mark.parametrize("failure", [None, DeepInferError("no weights")])
def test_nothing_stays_of_an_instance_that_was_never_ready(run, failure):
    assert not run(False, failure).exists()


def test_an_open_port_without_keys_is_said_in_the_log_and_at_the_start(
    run, monkeypatch, caplog, capsys, tmp_path
):
    monkeypatch.delenv("DEEPINFER_QUIET_START", raising=False)
    sentence = "It listens on 0.0.0.0 without API keys"
    run(True, None)
    assert sentence not in caplog.text + capsys.readouterr().out
    run(True, None, host="0.0.0.0")
    assert sentence in caplog.text
    assert sentence in capsys.readouterr().out
    caplog.clear()
    keys = tmp_path / "keys"
    keys.write_text("secret")
    run(True, None, host="0.0.0.0", api_keys_file=keys)
    assert sentence not in caplog.text + capsys.readouterr().out
