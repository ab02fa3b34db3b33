"""`deepinfer check prefix-cache` on real instances."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from daemon.errors import EXIT_USAGE

V41_TINY = Path(__file__).parents[1] / "data" / "v41_tiny"
LENGTHS = ("--prompt-tokens", 300, "--turn-tokens", 100, "--max-tokens", 6)


@pytest.mark.slow
def test_a_live_server_is_found_equal(cli, chat_server):
    done = cli("check", "prefix-cache", "--url", chat_server.url, "--turns", 2,
               "--conversations", 2, *LENGTHS, "--json", timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["equal"] is True
    assert report["model"] == "SmolLM2-135M-Instruct"
    by_place = {(turn["conversation"], turn["turn"]): turn for turn in report["turns"]}
    assert by_place.keys() == {(c, t) for c in (1, 2) for t in (1, 2)}
    for (conversation, number), turn in by_place.items():
        before = by_place.get((conversation, number - 1))
        known = before["prompt_tokens"] if before else 0
        assert turn["cached_tokens"] == known // 128 * 128
    assert report["hit_share"] > 0.2


def test_a_server_without_a_cache_is_said_to_have_none(cli, serve):
    with serve(hicache_size_gb=0) as server:
        server.ready()
        done = cli("check", "prefix-cache", "--url", server.url, *LENGTHS)
        assert done.returncode == EXIT_USAGE, done.stdout
        assert done.stderr.startswith("deepinfer: ")
        assert "has no prefix cache" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_model_without_a_chat_template_is_checked_with_plain_prompts(cli, serve, tmp_path):
    model = tmp_path / "v41_tiny"
    shutil.copytree(V41_TINY, model, ignore=shutil.ignore_patterns("golden*", "intermediates*"))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with serve(model=model, yoco_keep_tokens=24, max_model_len=1024) as server:
        server.ready()
        assert f"curl {server.url}/v1/completions" in server.output
        refused = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
        )
        assert refused.status == 400
        assert refused.json["error"]["code"] == "no_chat_template"
        done = cli(
            "check",
            "prefix-cache",
            "--url",
            server.url,
            "--turns",
            2,
            "--conversations",
            1,
            *LENGTHS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 of 2 answers equal." in done.stdout
