"""The map from token ids to the compressed ids that Engram hashes.

A checkpoint does not hold it; it follows from the tokenizer's vocabulary. A directory may carry a
stored one in `engram_token_map.json`, a JSON list with one entry a token id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Regex, Tokenizer, normalizers

from transport.model_files import TOKENIZER_FILE, ModelError, parse_json, read_text
from workers.contract import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from workers.models.deepseek_v41.config.model_config import ModelConfig

TOKEN_MAP_FILE: Final = "engram_token_map.json"

_UNDECODABLE: Final = "\ufffd"
# Stands for a text of one space while its surroundings are stripped.
_SPACE: Final = "\ue000"


def load_token_map(model_dir: Path, config: ModelConfig) -> torch.Tensor:
    """int64 `[vocab_size]`: the stored map, or else the one derived from `tokenizer.json`.

    Raises:
        ModelLoadError: there is neither, or the result does not fit `config`.
    """
    stored = model_dir / TOKEN_MAP_FILE
    if stored.is_file():
        return _stored_map(stored, config)
    path = model_dir / TOKENIZER_FILE
    if not path.is_file():
        raise ModelLoadError(
            f"{model_dir} has no {TOKENIZER_FILE}, from which the Engram token map is derived, and "
            f"no {TOKEN_MAP_FILE}."
        )
    try:
        tokenizer = Tokenizer.from_str(read_text(path) or "")
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    return token_map_from_tokenizer(tokenizer, config)


def token_map_from_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> torch.Tensor:
    """Derive the map, int64 `[vocab_size]`: tokens of equal normalised text share an id.

    Ids count up in the order in which texts first occur. A token whose bytes are no text by themselves is
    identified by its vocabulary entry instead.

    Raises:
        ModelLoadError: the number of different ids is not `engram_compressed_vocab_size`.
    """
    normaliser = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    ids: dict[str, int] = {}
    token_map = []
    for token in range(config.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _UNDECODABLE in text:
            key = tokenizer.id_to_token(token) or text
        else:
            key = normaliser.normalize_str(text) or text
        token_map.append(ids.setdefault(key, len(ids)))
    if len(ids) != config.engram_compressed_vocab_size:
        raise ModelLoadError(
            f"The tokenizer gives {len(ids)} compressed ids, but engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}: tokenizer and checkpoint do not belong together."
        )
    return torch.tensor(token_map, dtype=torch.int64)


def dummy_token_map(config: ModelConfig) -> torch.Tensor:
    return torch.arange(config.vocab_size) % config.engram_compressed_vocab_size


def _stored_map(path: Path, config: ModelConfig) -> torch.Tensor:
    values = parse_json(path, read_text(path) or "")
    limit = config.engram_compressed_vocab_size
    if not isinstance(values, list) or len(values) != config.vocab_size:
        raise ModelLoadError(
            f"{path} must be a list of {config.vocab_size} compressed ids, one a token."
        )
    if not all(type(value) is int and 0 <= value < limit for value in values):
        raise ModelLoadError(f"{path} holds something other than whole numbers below {limit}.")
    if len(set(values)) != limit:
        raise ModelLoadError(
            f"{path} has {len(set(values))} different compressed ids, but engram_compressed_vocab_size is "
            f"{limit}: it belongs to another tokenizer."
        )
    return torch.tensor(values, dtype=torch.int64)
