"""Random English of about as many tokens as wanted, whatever the server's tokenizer."""

from __future__ import annotations

from random import Random
from typing import Final

from daemon.cli.check.api_client import CHAT, COMPLETIONS, ApiClient, JsonBody

SAMPLE_WORDS: Final = 100
"""Length of the message that tells how many tokens a word has."""
_COMMON: Final = (
    "the of and to in is was for on that with as by at from it this an are be or not have but "
    "one all when which there they their has been would more will about time so what up only "
    "some could new other than these two first people now made over did down way find long "
    "water day part little good man work life place year small great house world night"
)
WORDS: Final = _COMMON.split()


class SampleText:
    """A source of text; the same seed gives the same texts at the same server."""

    def __init__(self, draw: Random, tokens_a_word: float) -> None:
        self._draw = draw
        self.tokens_a_word = tokens_a_word

    @classmethod
    def calibrated(
        cls, draw: Random, client: ApiClient, model: str, *, chat: bool = True
    ) -> SampleText:
        """Ask the server how many tokens a word has, with a short request that its cache never sees: a
        message, or a plain prompt without `chat`.

        Raises:
            RequestFailed: it does not answer.
        """
        words = " ".join(draw.choices(WORDS, k=SAMPLE_WORDS))
        prompt: JsonBody = (
            {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        )
        body = {"model": model, **prompt, "max_tokens": 1, "prefix_cache": False}
        answer = client.stream(CHAT if chat else COMPLETIONS, body)
        return cls(draw, max(answer.prompt_tokens, 1) / SAMPLE_WORDS)

    def words(self, tokens: int) -> str:
        count = max(1, round(tokens / self.tokens_a_word))
        return " ".join(self._draw.choices(WORDS, k=count))
