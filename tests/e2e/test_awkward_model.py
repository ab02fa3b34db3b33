"""A model, a path and surroundings in which every single thing is odd, and legal."""

from __future__ import annotations

import json
import struct
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from benchmarks.tiny_model import make_tokenizer

PADDED_BY = 128
TEMPLATE = (
    "{{ strftime_now('%Y') }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ODD = (
    "env", "-u", "PYTHONUTF8", "LC_ALL=C", "LANG=C", "PYTHONOPTIMIZE=2", "TZ=Pacific/Chatham",
    "http_proxy=http://127.0.0.1:9", "https_proxy=http://127.0.0.1:9", "ALL_PROXY=http://127.0.0.1:9",
    "sh", "-c", 'umask 077 && exec "$@"', "sh",
)  # fmt: skip


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    """Phi, whose head has a bias. Its largest is on a row that the tokenizer does not know."""
    folder = tmp_path / "Größe – 日本 1" / "real model"
    folder.mkdir(parents=True)
    vocab = make_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(7)
    config = PhiConfig(
        vocab_size=vocab + PADDED_BY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = PhiForCausalLM(config).bfloat16()
    with torch.no_grad():
        model.lm_head.bias[vocab + 5] = 1e4
    model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "generation_config.json").unlink()
    assert (folder / "model.safetensors.index.json").exists()
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [15 << 30], "data_offsets": [0, 60 << 30]}}
    ).encode()
    with (folder / "consolidated.safetensors").open("wb") as stray:  # 60 GB, all hole
        stray.write(struct.pack("<Q", len(header)) + header)
        stray.truncate(8 + len(header) + (60 << 30))
    link = tmp_path / "ein Link"
    link.symlink_to(folder.parent)
    return f"{link}/real model/"


def test_everything_odd_at_once(cli, model_path, short_dir):
    here = ("--run-dir", short_dir / "run")
    try:
        started = cli(
            "start", *here, "--model", model_path, "--host", "localhost", "--port", 0, through=ODD
        )
        assert started.returncode == 0, started.stderr
        status = json.loads(cli("status", "--json", *here).stdout)

        def post(path: str, **body: object) -> dict:
            request = urllib.request.Request(
                status["url"] + path,
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request
            ) as answer:
                return json.load(answer)

        chat = post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}],
            max_tokens=3, temperature=0, logprobs=True, top_logprobs=2,
        )  # fmt: skip
        (choice,) = chat["choices"]
        assert choice["message"]["content"] == ""
        assert chat["usage"]["completion_tokens"] == 3
        assert {token["token"] for token in choice["logprobs"]["content"]} == {""}
        text = post("/v1/completions", prompt="hello", max_tokens=2, temperature=0)
        assert text["choices"][0]["text"] == ""
        padded = post("/detokenize", tokens=[300, 390])
        assert padded["prompt"] == ""
        mode = (short_dir / "run" / "deepinfer.log").stat().st_mode
        assert mode & 0o077 == 0
    finally:
        stopped = cli("stop", *here)
    assert stopped.returncode == 0, stopped.stderr
