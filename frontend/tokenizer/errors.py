"""What can go wrong between text and token ids."""

from __future__ import annotations


class PromptError(ValueError):
    """A request's prompt cannot be rendered or encoded: the client's mistake, HTTP 400.

    `message` is one sentence for the client, `param` the request field at fault.
    """

    code = "invalid_prompt"

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class NoChatTemplateError(PromptError):
    """A conversation was sent to a model that has no chat template."""

    code = "no_chat_template"

    def __init__(self) -> None:
        super().__init__(
            "This model has no chat template: send a plain prompt to /v1/completions.", "messages"
        )
