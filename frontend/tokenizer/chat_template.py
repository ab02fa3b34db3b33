"""Render a conversation with the checkpoint's own Jinja template, in a sandbox.

As in the OpenAI API, a conversation opens a new assistant turn, also after a last message from the
assistant, unless its `add_generation_prompt` or `continue_final_message` say otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, cast

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from frontend.conversation import Conversation, Message, ToolCall
from frontend.tokenizer.chat_template_files import TemplateSource
from frontend.tokenizer.control_tokens import ControlTokens, Json, RenderedText
from frontend.tokenizer.errors import NoChatTemplateError, PromptError
from frontend.tokenizer.load import TokenizerFiles
from frontend.tokenizer.message_style import MessageStyle, has_text_arguments
from frontend.tokenizer.render_limits import RenderLimitError, RenderLimits, bounded
from transport.model_files import ModelError

_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_MAX_REASON_CHARS: Final = 300
_LIMITS_OF_A_FEW_WORDS: Final = RenderLimits.of(0)


class ChatTemplate:
    """The chat templates of one checkpoint. Construction tries them out once."""

    def __init__(self, files: TokenizerFiles) -> None:
        """
        Raises:
            ModelError: a template is not valid Jinja, or takes too much for a few words.
        """
        self._templates = {name: source.text for name, source in files.chat_templates.items()}
        self._special_tokens = files.special_tokens
        self.control_tokens = ControlTokens.of(files.tokenizer, self._templates.values())
        self._styles = {
            source.text: self._find_style(name, source)
            for name, source in files.chat_templates.items()
        }

    @property
    def exists(self) -> bool:
        return bool(self._templates)

    def render(
        self, conversation: Conversation, limits: RenderLimits = _LIMITS_OF_A_FEW_WORDS
    ) -> RenderedText:
        """The prompt as text, and where a client wrote the text of a control token.

        Raises:
            PromptError: no template, or the template refuses the messages or goes beyond `limits`.
        """
        source = self._choose(bool(conversation.tools))
        style = self._styles[source]
        try:
            return self._render_guarded(source, conversation, style, limits)
        except RenderLimitError:
            raise
        except PromptError:
            if not has_text_arguments(conversation.messages):
                raise
            wrapped = replace(style, wrap_text_arguments=True)
            return self._render_guarded(source, conversation, wrapped, limits)

    def _choose(self, has_tools: bool) -> str:
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise NoChatTemplateError

    def _render_guarded(
        self, source: str, conversation: Conversation, style: MessageStyle, limits: RenderLimits
    ) -> RenderedText:
        given = _template_input(conversation, style)
        try:
            if not self.control_tokens.occur_in(list(given)):
                return RenderedText(self._render(source, limits, *given))
            messages, *others = given
            sentinel, guarded = self.control_tokens.guard(messages, *others)
            text = self._render(source, limits, *guarded)
            return self.control_tokens.unguard(text, sentinel)
        except PromptError:
            raise
        except _TEMPLATE_FAULTS as error:
            raise PromptError(_refusal(error), "messages") from error

    def _render(
        self, source: str, limits: RenderLimits, messages: Json, tools: Json, arguments: Json
    ) -> str:
        options: dict[str, object] = {**self._special_tokens}
        if isinstance(arguments, dict):
            options.update(arguments)

        def render() -> str:
            rendered, _ = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=source, **options
            )
            return str(rendered[0])

        return bounded(render, limits)

    def _find_style(self, name: str, source: TemplateSource) -> MessageStyle:
        where = f"The chat template {name!r} in {source.file}"
        try:
            return self._try_styles(source.text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{where} is not valid Jinja (line {error.lineno}: {error.message})."
            ) from error
        except RenderLimitError as error:
            raise ModelError(
                f"{where} needs more than {error.limit} for a few words: correct it, or remove it."
            ) from error

    def _try_styles(self, source: str) -> MessageStyle:
        """Find out by trial in which form the template takes tool calls."""
        try:
            self._render(
                source, _LIMITS_OF_A_FEW_WORDS, *_template_input(_GREETING, MessageStyle())
            )
        except (jinja2.TemplateSyntaxError, RenderLimitError):
            raise
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
        try:
            return self._render(source, _LIMITS_OF_A_FEW_WORDS, *_template_input(_PROBE, style))
        except RenderLimitError:
            raise
        except _TEMPLATE_FAULTS:
            return None


def _template_input(
    conversation: Conversation, style: MessageStyle
) -> tuple[list[Json], Json, dict[str, Json]]:
    arguments: dict[str, object] = {"add_generation_prompt": conversation.add_generation_prompt}
    if conversation.continue_final_message:
        arguments["continue_final_message"] = True
    if conversation.reasoning_effort is not None:
        arguments["reasoning_effort"] = conversation.reasoning_effort
    arguments.update(conversation.template_kwargs)
    # What came as JSON is Json.
    tools = cast("Json", conversation.tools or None)
    return style.apply(conversation.messages), tools, cast("dict[str, Json]", arguments)


_STYLES: Final = tuple(
    MessageStyle(as_text, null) for null in (True, False) for as_text in (False, True)
)
"""In the order of preference: objects, then text; null, then ""."""
_GREETING: Final = Conversation([Message("user", "x")])
_PROBE_KEY: Final = "probe_key"
_MISREAD_PROBES: Final = (f"{{'{_PROBE_KEY}'", f'\\"{_PROBE_KEY}\\"')
"""An object printed by Python instead of as JSON; JSON text that was put into JSON once more."""
_PROBE_ID: Final = "probe0001"
"""Some templates insist on call ids of nine letters and digits."""
_PROBE: Final = Conversation(
    [
        Message("user", "x"),
        Message(
            "assistant", tool_calls=[ToolCall(_PROBE_ID, "probe", {_PROBE_KEY: "probe value"})]
        ),
        Message("tool", "x", "probe", tool_call_id=_PROBE_ID),
    ],
    [
        {
            "type": "function",
            "function": {
                "name": "probe",
                "description": "Probe",
                "parameters": {"type": "object", "properties": {"other": {"type": "string"}}},
            },
        }
    ],
)


def _refusal(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "..."
    return f"The model's chat template does not accept these messages: {reason.rstrip('.')}."
