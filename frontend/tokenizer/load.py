"""Read what a checkpoint directory says about its tokenizer.

Only the `tokenizers` library is imported, unless the checkpoint has no `tokenizer.json`: then
transformers converts what there is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

from frontend.tokenizer.chat_template_files import TemplateSource, read_chat_templates
from transport.model_files import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    JsonObject,
    ModelError,
    read_object,
    read_text,
)
from transport.wording import first_line

_NAMED_SPECIALS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_TOKEN_ID: Final = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class TokenizerFiles:
    """A checkpoint's tokenizer, with what its other files add to it."""

    directory: Path
    tokenizer: Tokenizer
    """Without truncation and padding. Shared by all users: never reconfigure it."""
    chat_templates: dict[str, TemplateSource]
    """By name; the usual one is `default`. Empty: not a chat model."""
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... -> text, for those that the checkpoint names."""


def load_tokenizer(model_dir: Path) -> TokenizerFiles:
    """Load the tokenizer of the checkpoint in `model_dir`.

    Raises:
        ModelError: a file is missing, unreadable or not what it should be.
    """
    if not model_dir.is_dir():
        raise ModelError(f"The model directory {model_dir} does not exist.")
    config = read_object(model_dir / TOKENIZER_CONFIG)
    path = model_dir / TOKENIZER_FILE
    tokenizer = _read_tokenizer(path) if path.exists() else _convert_tokenizer(model_dir)
    # A checkpoint may ask for both; a silently cut or padded prompt is never wanted here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special_tokens = _special_tokens(model_dir, config)
    try:
        _add_declared_tokens(tokenizer, config, special_tokens)
    # The library refuses some texts with plain Exception, or with half a character's UnicodeEncodeError.
    except Exception as error:
        raise ModelError(
            f"{model_dir / TOKENIZER_CONFIG} declares a token that the tokenizer cannot have "
            f"({first_line(error)})."
        ) from error
    return TokenizerFiles(
        directory=model_dir,
        tokenizer=tokenizer,
        chat_templates=read_chat_templates(model_dir),
        special_tokens=special_tokens,
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    text = read_text(path) or ""
    try:
        return Tokenizer.from_str(text)
    # The library raises plain Exception.
    except Exception as error:
        raise ModelError(f"{path} is not a usable tokenizer ({first_line(error)}).") from error


def _convert_tokenizer(model_dir: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and rarely needed

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(
            f"{model_dir} has no tokenizer.json, and no tokenizer can be made from its other "
            f"files ({first_line(error)})."
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or backend.get_vocab_size() == 0:
        raise ModelError(
            f"{model_dir} has no tokenizer.json, and its tokenizer ({type(loaded).__name__}) "
            "has no fast form."
        )
    return backend


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(model_dir: Path, config: JsonObject) -> dict[str, str]:
    older = read_object(model_dir / "special_tokens_map.json")
    found: dict[str, str] = {}
    for name in _NAMED_SPECIALS:
        text = _token_text(config.get(name)) or _token_text(older.get(name))
        if text is not None:
            found[name] = text
    return found


def _add_declared_tokens(
    tokenizer: Tokenizer, config: JsonObject, special_tokens: dict[str, str]
) -> None:
    """Add what only `tokenizer_config.json` declares, and special tokens that are plain words of
    the vocabulary. Ids never change: a token whose declared id is not free is left out."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    entries = declared.items() if isinstance(declared, dict) else ()
    numbered = [(int(key), entry) for key, entry in entries if _TOKEN_ID.fullmatch(key)]
    for expected, entry in sorted(numbered, key=lambda item: item[0]):
        text = _token_text(entry)
        if text is None or text in known or not isinstance(entry, dict):
            continue
        if tokenizer.token_to_id(text) == expected or (
            tokenizer.token_to_id(text) is None and tokenizer.get_vocab_size() == expected
        ):
            tokenizer.add_tokens([_added_token(text, entry)])
            known.add(text)
    for text in special_tokens.values():
        if text not in known and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
            known.add(text)


def _added_token(text: str, entry: JsonObject) -> AddedToken:
    special = bool(entry.get("special", False))
    return AddedToken(
        text,
        single_word=bool(entry.get("single_word", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        normalized=bool(entry.get("normalized", not special)),
        special=special,
    )
