"""The official client against a real model."""

from __future__ import annotations

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(chat_server):
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.models.list().data[0].id


def test_the_model_is_listed_with_its_context_length(client):
    models = client.models.list().data
    assert [m.id for m in models] == ["SmolLM2-135M-Instruct"]
    assert models[0].max_model_len == 8192
    assert models[0].sampling_defaults == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert client.models.retrieve("SmolLM2-135M-Instruct").id == models[0].id


def test_chat_answers_in_english_the_same_streamed_and_plain(client, model):
    plain = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=40
    )
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=40, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = plain.choices[0].message.content
    assert "Paris" in text
    assert plain.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        plain.usage.prompt_tokens, plain.usage.completion_tokens, plain.usage.total_tokens,
    )  # fmt: skip
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert len({c.id for c in chunks}) == 1


def test_usage_counts_the_tokens_of_the_real_template(client, model, chat_server):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=5, seed=1)
    tokenized = chat_server.post("/tokenize", {"messages": QUESTION}).json
    assert answer.usage.prompt_tokens == tokenized["count"]
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_completion_goes_on_with_the_text(client, model):
    answer = client.completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_two_choices_with_a_seed_differ_and_are_repeatable(client, model):
    def ask():
        answer = client.completions.create(
            model=model, prompt="Once upon a time", seed=11, n=2, max_tokens=12, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert first[0] != first[1]
    assert ask() == first


def test_logprobs_tell_the_chosen_token_and_its_rivals(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy: the likeliest
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.logprob <= 0
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(client, model, stream):
    arguments = {"model": model, "messages": QUESTION, "temperature": 0, "stop": ["aris", "zzz"]}
    answer = client.chat.completions.create(**arguments, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.delta.content or "" for choice in chunks)
        reason = chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text.endswith(" P")
    assert reason == "stop"


def test_who_says_nothing_of_sampling_gets_the_models_defaults_and_who_names_a_temperature_samples(
    client, model
):
    def ask(question: str, **sampling: float) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=40, **sampling
        )
        return answer.choices[0].message.content

    hello = ask("Say hello.")
    assert "Hello" in hello
    assert hello == ask("Say hello.", temperature=0)
    assert ask("What is the capital of France?") == "The capital of France is Paris."

    animals = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Write one sentence about any animal."}],
        max_tokens=16, temperature=1.0, seed=77, n=4,
    )  # fmt: skip
    assert len({choice.message.content for choice in animals.choices}) == 4


def test_errors_become_the_exceptions_of_the_client(client, model):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=3)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert missing.value.param == "model"
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="text")
