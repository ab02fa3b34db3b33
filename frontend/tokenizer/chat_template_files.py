"""Finds the chat templates of a checkpoint, wherever its version of transformers has put them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transport.model_files import TOKENIZER_CONFIG, ModelError, read_object, read_text


@dataclass(frozen=True)
class TemplateSource:
    text: str
    """Jinja."""
    file: Path
    """Where it stands, for what is said of it."""


def read_chat_templates(model_dir: Path) -> dict[str, TemplateSource]:
    """By name, the usual one is `default`; a file of its own wins over the configuration's field. Empty: not
    a chat model.

    Raises:
        ModelError: a file is unreadable or not what it should be.
    """
    templates: dict[str, TemplateSource] = {}
    for file in (model_dir / TOKENIZER_CONFIG, model_dir / "chat_template.json"):
        templates.update(_named_templates(file, read_object(file).get("chat_template")))
    own = model_dir / "chat_template.jinja"
    templates.update(_named_templates(own, read_text(own)))
    for file in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = TemplateSource(read_text(file) or "", file)
    return templates


def _named_templates(file: Path, value: object) -> dict[str, TemplateSource]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": TemplateSource(value, file)}
    if isinstance(value, list):
        if not all(isinstance(item, dict) for item in value):
            raise ModelError(f"{file} has a chat_template list of things not objects.")
        pairs = [(item.get("name"), item.get("template")) for item in value]
    elif isinstance(value, dict):
        pairs = list(value.items())
    else:
        raise ModelError(f"{file} has a chat_template that is not text.")
    named: dict[str, TemplateSource] = {}
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(f"{file} has a chat_template without a name or a text.")
        named[name] = TemplateSource(template, file)
    return named
