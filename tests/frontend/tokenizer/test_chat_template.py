"""Rendering with templates of several families, and messages in every odd form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from frontend.api.openai_chat import read_chat
from frontend.conversation import Conversation
from frontend.generation.request import ModelLimits
from frontend.tokenizer.chat_template import ChatTemplate
from frontend.tokenizer.errors import NoChatTemplateError, PromptError
from frontend.tokenizer.load import load_tokenizer
from transport.model_files import ModelError

WriteCheckpoint = Callable[..., Path]

LIMITS = ModelLimits("served", 1000, 4096, 8)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.tool_calls %}"
    "{{- '<|im_start|>call ' }}{{- m.tool_calls[0].function.arguments | tojson }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '|' + m.content | trim + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant|' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant.') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
QWEN = (
    "{%- if tools %}<|im_start|>tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{%- endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content or '' }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{%- if call.function.arguments is string %} {{ call.function.arguments }}"
    "{%- else %} {{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
TEXT_ARGUMENTS = (  # joins the arguments as text, and asks whether the content is null
    "{% for m in messages %}{% if m.content is none %}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
)
JSON_ARGUMENTS = (  # turns whatever it gets into JSON
    "{% for m in messages %}{{ m.role }}:{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ITEM_ARGUMENTS = (  # walks over the arguments' items
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}"
    "{% endfor %}"
)
TEMPLATES = {
    "llama3": LLAMA3,
    "qwen": QWEN,
    "json_arguments": JSON_ARGUMENTS,
    "text_arguments": TEXT_ARGUMENTS,
    "item_arguments": ITEM_ARGUMENTS,
}

PLAIN_TOOL = {"type": "function", "function": {"name": "f"}}

Load = Callable[[object], ChatTemplate]


@pytest.fixture
def load(write_checkpoint: WriteCheckpoint) -> Load:
    def make(template: object) -> ChatTemplate:
        folder = write_checkpoint(
            "byte_level", template, bos_token="<|endoftext|>", eos_token="<|im_end|>"
        )
        return ChatTemplate(load_tokenizer(folder))

    return make


def conversation_of(body: dict) -> Conversation:
    """What the chat endpoint makes of a body, as it arrives at the tokenizer."""
    frame = read_chat(json.dumps(body).encode(), LIMITS).prompts[0].frame
    return msgspec.json.decode(frame, type=Conversation)


def rendered(
    template: ChatTemplate, messages: list[dict], tools: list[dict] | None, kwargs: dict
) -> str:
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    return template.render(conversation_of(body)).text


def user(text: object) -> dict:
    return {"role": "user", "content": text}


def call(arguments: object, **message: object) -> dict:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **message}


def tool_turn(arguments: object) -> list[dict]:
    result = {"role": "tool", "tool_call_id": "c1", "content": "12"}
    return [user("w"), call(arguments), result]


def test_equals_transformers_for_the_default_model(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    messages = [user("Hi"), {"role": "assistant", "content": "Yes?"}, user(" é <b> \n")]
    expected = AutoTokenizer.from_pretrained(smollm2_dir).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered(ChatTemplate(load_tokenizer(smollm2_dir)), messages, None, {}) == expected


def test_llama_style(load: Load) -> None:
    template = load(LLAMA3)
    assert rendered(template, [user("  hi ")], None, {}) == (
        "<|endoftext|><|im_start|>user|hi<|im_end|><|im_start|>assistant|"
    )
    text = rendered(template, tool_turn('{"a": "<é>"}'), None, {})
    assert '<|im_start|>call {"a": "<é>"}' in text


def test_alternation_check_is_a_client_error(load: Load) -> None:
    template = load(MISTRAL)
    assert rendered(template, [user("a")], None, {}) == "<|endoftext|>[INST] a [/INST]"
    with pytest.raises(PromptError, match="Roles must alternate user/assistant") as caught:
        rendered(template, [user("a"), user("b")], None, {})
    assert caught.value.param == "messages"


def test_tools_and_template_arguments(load: Load) -> None:
    template = load(QWEN)
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    text = rendered(template, [user("x")], tools, {"enable_thinking": False})
    assert json.dumps(tools[0], ensure_ascii=False) in text
    assert text.endswith("<|im_start|>assistant\n<think></think>")
    assert "tools" not in rendered(template, [user("x")], [], {})


def test_thinking_of_earlier_turns_is_split_off(load: Load) -> None:
    turns = [user("x"), {"role": "assistant", "content": "<think>no</think>\nyes"}, user("y")]
    text = rendered(load(QWEN), turns, None, {})
    assert "<|im_start|>assistant\nyes<|im_end|>" in text.replace("assistantyes", "assistant\nyes")
    assert "no" not in text


def test_tool_use_template_is_chosen_for_tools(load: Load) -> None:
    template = load(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    )
    assert rendered(template, [user("x")], None, {}) == "plain"
    assert rendered(template, [user("x")], [PLAIN_TOOL], {}) == "tools"


def test_each_template_gets_the_arguments_it_can_read(load: Load) -> None:
    turn = tool_turn('{"city": "Oslo"}')
    assert '{"city": "Oslo"}' in rendered(load(QWEN), turn, None, {})
    assert '<call>f{"city": "Oslo"}' in rendered(load(TEXT_ARGUMENTS), turn, None, {})
    assert '<call>{"city": "Oslo"}' in rendered(load(JSON_ARGUMENTS), turn, None, {})
    assert "<city=Oslo>" in rendered(load(ITEM_ARGUMENTS), turn, None, {})
    # The same conversation with the arguments as an object is the same prompt.
    for source in TEMPLATES.values():
        template = load(source)
        as_object = rendered(template, tool_turn({"city": "Oslo"}), None, {})
        assert as_object == rendered(template, turn, None, {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_arguments_render(load: Load, name: str) -> None:
    template = load(TEMPLATES[name])
    odd = ["", " ", "{}", "[]", "null", "42", '"Oslo"', "true", "{bad", '{"a":1}{"b":2}', "\\"]
    odd += ['{"a": NaN}', "[" * 5000, "9" * 5000, '{"city": "Oslo"']
    for arguments in [*odd, None, {"a": {"b": [1, None]}}]:
        assert rendered(template, tool_turn(arguments), None, {})


@pytest.mark.parametrize("name", [*TEMPLATES, "chatml"])
@pytest.mark.parametrize("content", [None, "", []])
def test_absent_content_beside_calls(load: Load, chatml: str, name: str, content: object) -> None:
    template = load(TEMPLATES.get(name, chatml))
    turn = [user("w"), call("{}", content=content), tool_turn("{}")[2]]
    text = rendered(template, turn, None, {})
    assert "None" not in text
    assert text == rendered(template, tool_turn("{}"), None, {})


def test_content_parts_and_roles(load: Load, chatml: str) -> None:
    template = load(chatml)

    def render(*messages: dict) -> str:
        return rendered(template, list(messages), None, {})

    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "three"}]
    assert render(user(parts)) == render(user("Name three"))
    assert render(user([])) == render(user(""))
    assert render({"role": "developer", "content": "x"}) == render(
        {"role": "system", "content": "x"}
    )
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    assert render(refusal) == render({"role": "assistant", "content": "no"})
    empty_calls = {"role": "assistant", "content": "ok", "tool_calls": [], "name": None}
    assert render(empty_calls) == render({"role": "assistant", "content": "ok"})


def test_last_message_from_the_assistant(load: Load, chatml: str) -> None:
    template = load(chatml)
    turns = [user("x"), {"role": "assistant", "content": "The answer is"}]
    new_turn = rendered(template, turns, None, {})
    assert new_turn.endswith("The answer is<|im_end|>\n<|im_start|>assistant\n")
    goes_on = rendered(template, turns, None, {"continue_final_message": True})
    assert goes_on.endswith("<|im_start|>assistant\nThe answer is")
    unopened = rendered(template, turns, None, {"add_generation_prompt": False})
    assert unopened.endswith("The answer is<|im_end|>\n")


def test_no_template(load: Load) -> None:
    with pytest.raises(NoChatTemplateError, match="/v1/completions"):
        rendered(load(None), [user("x")], None, {})


def test_broken_template(load: Load) -> None:
    told = r"'default' in \S+/tokenizer_config.json is not valid Jinja \(line 2"
    with pytest.raises(ModelError, match=told):
        load("ok\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages | sum }}",
        "{{ ''.__class__.mro() }}",
    ],
)
def test_template_faults_are_client_errors(load: Load, source: str) -> None:
    with pytest.raises(PromptError, match="chat template does not accept") as caught:
        rendered(load(source), [user("x")], None, {})
    assert "\n" not in caught.value.message
