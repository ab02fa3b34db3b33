"""Turn a Llama GGUF file into a Hugging Face model directory, without torch or transformers.

Weights are dequantized to float32, llama.cpp's tensor names become Hugging Face's, and the row
order of the query and key projections (llama.cpp interleaves the rotary halves) is put back.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FloatArray = npt.NDArray[np.float32]

MODEL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)

_CONTROL_TOKEN_TYPE: Final = 3
_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OS_ERROR: Final = re.compile(r"os error (\d+)")
_BLOCK_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GgufConversionError(ValueError):
    """The file is not one that this module converts; the message is one sentence."""


def convert_llama_gguf(source: Path, target: Path, sampling: Mapping[str, object]) -> None:
    """Write `MODEL_FILES` into the existing directory `target`, each flushed to disk.

    `sampling` goes into `generation_config.json`: a GGUF file says nothing about it.

    Raises:
        GgufConversionError: not a GGUF file, or not a Llama model with a SmolLM tokenizer.
        OSError: `target` cannot be written.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise GgufConversionError(f"{source} is not a readable GGUF file ({error}).") from error
    fields = _Fields(reader, source)
    config = _model_config(fields, tied="output.weight" not in {t.name for t in reader.tensors})
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _generation_config(fields, sampling))
    tokenizer = _build_tokenizer(fields).to_str(pretty=True)
    (target / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))
    _save_weights(_weights(reader, fields), target / "model.safetensors")
    # safetensors makes its file readable by the owner alone; let it be like the others.
    (target / "model.safetensors").chmod((target / "config.json").stat().st_mode & 0o777)
    for name in MODEL_FILES:
        _flush(target / name)


class _Fields:
    """Typed access to a GGUF file's metadata."""

    def __init__(self, reader: gguf.GGUFReader, source: Path) -> None:
        self._reader = reader
        self._source = source
        self.expect("general.architecture", "llama")
        self.expect("tokenizer.ggml.model", "gpt2")
        self.expect("tokenizer.ggml.pre", "smollm")

    def expect(self, key: str, value: str) -> None:
        found = self.text(key)
        if found != value:
            raise GgufConversionError(f"{self._source} has {key} {found!r}; need {value!r}.")

    def _get(self, key: str) -> object:
        field = self._reader.get_field(key)
        if field is None:
            raise GgufConversionError(f"{self._source} lacks the field {key}.")
        return field.contents()

    def text(self, key: str) -> str:
        return str(self._get(key))

    def integer(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int):
            raise GgufConversionError(f"{self._source} has {key} = {value!r}; need an integer.")
        return value

    def number(self, key: str) -> float:
        """A float32 as the shortest decimal that means it (1e-05, not 9.9999997e-06)."""
        return float(str(np.float32(self._get(key))))  # type: ignore[arg-type]

    def texts(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, list):
            raise GgufConversionError(f"{self._source} has a {key} that is not a list.")
        return value

    def token(self, name: str) -> str:
        return self.texts("tokenizer.ggml.tokens")[self.integer(f"tokenizer.ggml.{name}_token_id")]


def _model_config(fields: _Fields, *, tied: bool) -> dict[str, object]:
    heads = fields.integer("llama.attention.head_count")
    width = fields.integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.integer("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "max_position_embeddings": fields.integer("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_key_value_heads": fields.integer("llama.attention.head_count_kv"),
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": fields.number("llama.rope.freq_base"),
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
    }


def _generation_config(fields: _Fields, sampling: Mapping[str, object]) -> dict[str, object]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    tokens = {
        f"{name}_token_id": fields.integer(f"tokenizer.ggml.{key}_token_id")
        for name, key in keys.items()
    }
    return {**tokens, **sampling}


def _build_tokenizer(fields: _Fields) -> Tokenizer:
    """A byte-level BPE that splits digits one by one, as the `smollm` pre-tokenizer does."""
    tokens = fields.texts("tokenizer.ggml.tokens")
    kinds = fields.texts("tokenizer.ggml.token_type")
    merges: list[tuple[str, str]] = []
    for line in fields.texts("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if int(kind) == _CONTROL_TOKEN_TYPE
        ]
    )
    return tokenizer


def _tokenizer_config(fields: _Fields) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": fields.token("bos"),
        "eos_token": fields.token("eos"),
        "pad_token": fields.token("padding"),
        "unk_token": fields.token("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.integer("llama.context_length"),
        "chat_template": fields.text("tokenizer.chat_template"),
    }


def _weights(reader: gguf.GGUFReader, fields: _Fields) -> dict[str, FloatArray]:
    heads = {
        "attn_q": fields.integer("llama.attention.head_count"),
        "attn_k": fields.integer("llama.attention.head_count_kv"),
    }
    weights: dict[str, FloatArray] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = np.ascontiguousarray(values, dtype=np.float32)
        block = _BLOCK_NAME.fullmatch(tensor.name)
        if tensor.name in _TOP_NAMES:
            weights[_TOP_NAMES[tensor.name]] = values
        elif block is not None and block[2] in _BLOCK_NAMES:
            if block[2] in heads:
                values = _undo_rotary_interleave(values, heads[block[2]])
            weights[f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.weight"] = values
        else:
            raise GgufConversionError(f"The GGUF file has an unknown tensor {tensor.name!r}.")
    return weights


def _undo_rotary_interleave(weight: FloatArray, heads: int) -> FloatArray:
    """[heads * head_dim, in]: reorder the rows of each head from (pair, half) to (half, pair)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save_weights(weights: dict[str, FloatArray], path: Path) -> None:
    """Raises OSError, also for what safetensors calls an error of its own."""
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
