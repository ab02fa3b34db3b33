"""Render a conversation with the checkpoint's own Jinja template, in a sandbox.

As in the OpenAI API, every request opens a new assistant turn, also after a last message from the
assistant. Two template arguments change this, as with other servers: `add_generation_prompt: false`
leaves the turn unopened, and `continue_final_message: true` lets the model go on with the last
message itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from frontend.tokenizer.chat_messages import MessageStyle, normalize_messages
from frontend.tokenizer.control_tokens import ControlTokens, Json, RenderedText
from frontend.tokenizer.errors import NoChatTemplateError, PromptError, TokenizerLoadError
from frontend.tokenizer.load import TokenizerFiles

_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_KWARGS: Final = "chat_template_kwargs"
_RESERVED_KWARGS: Final = frozenset(
    {
        "chat_template",
        "conversations",
        "documents",
        "messages",
        "raise_exception",
        "return_assistant_tokens_mask",
        "self",
        "strftime_now",
        "tools",
    }
)
_MAX_REASON_CHARS: Final = 300


class ChatTemplate:
    """The chat templates of one checkpoint. Construction tries them out once."""

    def __init__(self, files: TokenizerFiles) -> None:
        """
        Raises:
            TokenizerLoadError: a template is not valid Jinja.
        """
        self._templates = files.chat_templates
        self._special_tokens = files.special_tokens
        self.control_tokens = ControlTokens.of(files.tokenizer, self._templates.values())
        self._styles = {
            source: self._find_style(name, source, files)
            for name, source in self._templates.items()
        }

    def render_guarded(
        self, messages: list[Json], tools: list[Json] | None, template_kwargs: Mapping[str, Json]
    ) -> RenderedText:
        """The prompt as text, and where a client wrote the text of a control token.

        Raises:
            PromptError: no template, or the template refuses the messages.
        """
        _check_kwargs(template_kwargs)
        source = self._choose(tools)
        style = self._styles[source]
        prepared, odd = normalize_messages(messages, style)
        try:
            return self._render_guarded(source, prepared, tools or None, template_kwargs)
        except PromptError:
            if not odd:
                raise
            prepared, _ = normalize_messages(messages, style, wrap_odd_arguments=True)
            return self._render_guarded(source, prepared, tools or None, template_kwargs)

    def _choose(self, tools: list[Json] | None) -> str:
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise NoChatTemplateError

    def _render_guarded(
        self,
        source: str,
        messages: list[Json],
        tools: list[Json] | None,
        kwargs: Mapping[str, Json],
    ) -> RenderedText:
        given: Json = [messages, tools, dict(kwargs)]
        try:
            if not self.control_tokens.occur_in(given):
                return RenderedText(self._render(source, messages, tools, kwargs))
            sentinel, guarded = self.control_tokens.guard(messages, tools, dict(kwargs))
            text = self._render(source, *guarded)
            return self.control_tokens.unguard(text, sentinel)
        except PromptError:
            raise
        except _TEMPLATE_FAULTS as error:
            raise PromptError(_refusal(error), "messages") from error

    def _render(self, source: str, messages: Json, tools: Json, kwargs: object) -> str:
        options: dict[str, object] = {"add_generation_prompt": True, **self._special_tokens}
        if isinstance(kwargs, Mapping):
            options.update(kwargs)
            if kwargs.get("continue_final_message"):
                options["add_generation_prompt"] = False
        rendered, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, **options
        )
        return str(rendered[0])

    def _find_style(self, name: str, source: str, files: TokenizerFiles) -> MessageStyle:
        """Find out by trial in which form the template takes tool calls."""
        try:
            self._render(source, [{"role": "user", "content": "x"}], None, {})
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerLoadError(
                f"The chat template {name!r} of {files.directory} is not valid Jinja "
                f"(line {error.lineno}: {error.message})."
            ) from error
        except _TEMPLATE_FAULTS:
            pass  # It may want another first message; each request will show.
        renders: list[MessageStyle] = []
        for style in _STYLES:
            text = self._try(source, style)
            blank = self._try(source, MessageStyle(style.arguments_as_text, null_content=False))
            if text is None or text.count("None") > (blank or text).count("None"):
                continue
            renders.append(style)
            if _PROBE_KEY in text and not any(fault in text for fault in _MISREAD_PROBES):
                return style
        # Here the template ignores tool calls, or refuses them.
        return renders[0] if renders else MessageStyle(null_content=False)

    def _try(self, source: str, style: MessageStyle) -> str | None:
        """The probe conversation in this style; None if the template fails."""
        messages, _ = normalize_messages(_PROBE, style)
        try:
            return self._render(source, messages, [_PROBE_TOOL], {})
        except _TEMPLATE_FAULTS:
            return None


_STYLES: Final = tuple(
    MessageStyle(as_text, null) for null in (True, False) for as_text in (False, True)
)
"""In the order of preference: objects, then text; null, then ""."""
_PROBE_KEY: Final = "probe_key"
_MISREAD_PROBES: Final = (f"{{'{_PROBE_KEY}'", f'\\"{_PROBE_KEY}\\"')
"""An object printed by Python instead of as JSON; JSON text that was put into JSON once more."""
_PROBE_TOOL: Final[Json] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe",
        "parameters": {"type": "object", "properties": {"other": {"type": "string"}}},
    },
}


# Some templates insist on call ids of nine letters and digits.
_PROBE_CALL: Final[Json] = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probe", "arguments": {_PROBE_KEY: "probe value"}},
}
_PROBE: Final[list[Json]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "name": "probe", "tool_call_id": "probe0001", "content": "x"},
]


def _check_kwargs(kwargs: Mapping[str, Json]) -> None:
    for name in kwargs:
        if name in _RESERVED_KWARGS:
            raise PromptError(f"{_KWARGS} must not contain {name!r}.", _KWARGS)
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(kwargs.get(name, False), bool):
            raise PromptError(f"{_KWARGS}.{name} must be true or false.", _KWARGS)
    if kwargs.get("add_generation_prompt") and kwargs.get("continue_final_message"):
        raise PromptError(
            f"{_KWARGS} asks both for a new turn (add_generation_prompt) and for the last one to "
            "go on (continue_final_message): choose one.",
            _KWARGS,
        )


def _refusal(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "..."
    return f"The model's chat template does not accept these messages: {reason.rstrip('.')}."
