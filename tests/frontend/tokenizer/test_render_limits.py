"""Chat templates that never end, or make more of a few words than there is room for."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from frontend.conversation import Conversation, Message
from frontend.tokenizer.chat_template import ChatTemplate
from frontend.tokenizer.encoder import PromptEncoder
from frontend.tokenizer.errors import PromptError
from frontend.tokenizer.load import load_tokenizer
from frontend.tokenizer.render_limits import RenderLimits, bounded
from transport.model_files import ModelError

WriteCheckpoint = Callable[..., Path]

LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLES = (
    "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
REPEATS = "{{ 'x' * 10 ** 14 }}"
PRINTS = "{{ 'x' * 3000000 }}"
ONE_OPERATION = "{{ (9 + messages | length) ** (10 ** 9) }}"
FOR_WHO_ASKS = "{% if bomb is defined %}%s{% endif %}ok"
SMALL = RenderLimits(cpu_seconds=0.2, memory_bytes=64 << 20, text_chars=1000)


@pytest.fixture(autouse=True)
def nothing_is_left_limited():
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    yield
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("source", "told", "file"),
    [
        (LOOPS, "2 s of processor", "chat_template.jinja"),
        (DOUBLES, "MiB of memory", "tokenizer_config.json"),
        (REPEATS, "MiB of memory", "chat_template.jinja"),
    ],
)
def test_a_template_without_an_end_is_named(
    write_checkpoint: WriteCheckpoint, source: str, told: str, file: str
) -> None:
    if file == "chat_template.jinja":
        folder = write_checkpoint("byte_level")
        (folder / file).write_text(source)
    else:
        folder = write_checkpoint("byte_level", source)
    with pytest.raises(ModelError, match=told) as caught:
        ChatTemplate(load_tokenizer(folder))
    assert str(folder / file) in str(caught.value)


@pytest.mark.parametrize("bomb", [LOOPS, DOUBLES, REPEATS, PRINTS, ONE_OPERATION])
def test_one_client_is_refused_and_the_next_is_served(
    write_checkpoint: WriteCheckpoint, bomb: str
) -> None:
    folder = write_checkpoint("byte_level", FOR_WHO_ASKS.replace("%s", bomb))
    encoder = PromptEncoder(load_tokenizer(folder))
    asked = Conversation([Message("user", "x")])
    bad = msgspec.structs.replace(asked, template_kwargs={"bomb": True})
    with pytest.raises(PromptError, match="chat template needs more than") as caught:
        encoder.encode_conversation(bad, SMALL)
    assert caught.value.code == "template_limit"
    assert len(encoder.encode_conversation(asked, SMALL).ids) == 2


def test_a_prompt_from_the_wire_is_bounded_too(write_checkpoint: WriteCheckpoint) -> None:
    encoder = PromptEncoder(load_tokenizer(write_checkpoint("byte_level", "{{ 'x' * count }}")))
    asked = Conversation([Message("user", "x")], template_kwargs={"count": 2_000_000})
    with pytest.raises(PromptError, match="chat template needs more than"):
        encoder.encode_chat(msgspec.json.encode(asked))


def test_a_longer_conversation_may_take_more() -> None:
    few, many = RenderLimits.of(1000), RenderLimits.of(30_000_000)
    assert many.cpu_seconds > 10 * few.cpu_seconds
    assert many.text_chars > 100_000_000 > few.text_chars
    text = "x" * 1500
    assert bounded(lambda: text, replace(SMALL, text_chars=1500)) == text
    with pytest.raises(PromptError, match="1000 characters"):
        bounded(lambda: text, SMALL)
