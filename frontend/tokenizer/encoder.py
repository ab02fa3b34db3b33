"""Prompts to token ids."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from tokenizers import Tokenizer

from frontend.conversation import Conversation
from frontend.tokenizer.chat_template import ChatTemplate
from frontend.tokenizer.control_tokens import RenderedText, alias_tokenizer
from frontend.tokenizer.errors import PromptError
from frontend.tokenizer.load import TokenizerFiles
from frontend.tokenizer.render_limits import RenderLimits
from transport.framing import TokenArray

_DECODER = msgspec.json.Decoder(Conversation)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids, and the seconds spent on rendering and on encoding it."""

    ids: TokenArray
    render_seconds: float
    encode_seconds: float


class PromptEncoder:
    """Encodes the prompts of one model. Not bound to a thread, but one call at a time."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokenizer = files.tokenizer
        self._template = ChatTemplate(files)

    def warm_up(self) -> None:
        """Make now what would make the first prompts wait, and each fork of this process anew."""
        self.encode_text("warm up", add_special_tokens=False)
        if self._template.exists:
            _encode(self._aliased[0], "warm up", "messages", False)

    def encode_chat(self, payload: bytes) -> EncodedPrompt:
        """Render and encode a `Conversation`, given as JSON.

        Raises:
            PromptError: it cannot be read, rendered or encoded.
        """
        try:
            conversation = _DECODER.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise PromptError(f"The conversation cannot be read: {error}.", "messages") from error
        return self.encode_conversation(conversation, RenderLimits.of(len(payload)))

    def encode_conversation(
        self, conversation: Conversation, limits: RenderLimits
    ) -> EncodedPrompt:
        """Control tokens come from the template alone; in the client's text they are ordinary text.

        Raises:
            PromptError: the messages cannot be rendered within `limits`, or not encoded.
        """
        started = time.perf_counter()
        rendered = self._template.render(conversation, limits)
        middle = time.perf_counter()
        ids = self._encode_rendered(rendered)
        return EncodedPrompt(ids, middle - started, time.perf_counter() - middle)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> EncodedPrompt:
        """Encode a raw prompt. Whoever sends one writes the whole prompt, so control tokens in it
        are control tokens. `add_special_tokens`: let the tokenizer add its own begin and end.

        Raises:
            PromptError: the text is not valid Unicode.
        """
        started = time.perf_counter()
        ids = _encode(self._tokenizer, text, "prompt", add_special_tokens)
        return EncodedPrompt(ids, 0.0, time.perf_counter() - started)

    def _encode_rendered(self, rendered: RenderedText) -> TokenArray:
        if not rendered.plain:
            return _encode(self._tokenizer, rendered.text, "messages", False)
        tokenizer, aliases = self._aliased
        text = self._template.control_tokens.replace_active(rendered, aliases)
        return _encode(tokenizer, text, "messages", False)

    @cached_property
    def _aliased(self) -> tuple[Tokenizer, dict[str, str]]:
        return alias_tokenizer(self._tokenizer, self._template.control_tokens.all)


def _encode(tokenizer: Tokenizer, text: str, param: str, add_special_tokens: bool) -> TokenArray:
    """Ids of `text`. The batch call, unlike `encode`, lets other threads run meanwhile."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The text contains half of a UTF-16 surrogate pair (U+{ord(text[error.start]):04X}), "
            "which is not a character.",
            param,
        ) from error
    encoded = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return np.asarray(encoded[0].ids, dtype=np.int32)
