"""Finds the chat templates of a checkpoint, wherever its version of transformers has put them."""

from __future__ import annotations

from pathlib import Path

from frontend.tokenizer.checkpoint_files import TOKENIZER_CONFIG, read_object, read_text
from frontend.tokenizer.errors import TokenizerLoadError


def read_chat_templates(model_dir: Path) -> dict[str, str]:
    """Jinja sources by name, the usual one is `default`; a file of its own wins over the configuration's
    field. Empty: not a chat model.

    Raises:
        TokenizerLoadError: a file is unreadable or not what it should be.
    """
    templates: dict[str, str] = {}
    path = model_dir / TOKENIZER_CONFIG
    for origin, value in (
        (path, read_object(path).get("chat_template")),
        (
            model_dir / "chat_template.json",
            read_object(model_dir / "chat_template.json").get("chat_template"),
        ),
        (model_dir / "chat_template.jinja", read_text(model_dir / "chat_template.jinja")),
    ):
        templates.update(_named_templates(origin, value))
    extra = model_dir / "additional_chat_templates"
    for file in sorted(extra.glob("*.jinja")):
        templates.update(dict.fromkeys([file.stem], read_text(file) or ""))
    return templates


def _named_templates(origin: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        if not all(isinstance(item, dict) for item in value):
            raise TokenizerLoadError(f"{origin} has a chat_template list of things not objects.")
        value = {item.get("name"): item.get("template") for item in value}
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{origin} has a chat_template that is not text.")
    named: dict[str, str] = {}
    for name, template in value.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerLoadError(f"{origin} has a chat_template without a name or a text.")
        named[name] = template
    return named
