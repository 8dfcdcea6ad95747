"""The official client against a live server: every call a user makes with it, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import AlphabetExecutor, is_idle, live_server, make_engine, wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    engine = make_engine(AlphabetExecutor(step_s=0.0005))
    with (
        live_server(engine, api_key=["first", "sesame"]) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client,
    ):
        yield client
        wait_until(lambda: is_idle(engine), "the engine is idle")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=HELLO, temperature=0, max_completion_tokens=5
    )
    assert answer.choices[0].message.content == "abcde"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_chat_without_a_limit_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HELLO, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy",
        messages=HELLO,
        temperature=0,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "abcde"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_the_clients_own_stream_helper_assembles_the_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="toy", messages=HELLO, temperature=0, max_tokens=20, n=2, stop="fg"
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["abcde", "abcde"]


def test_two_samples_and_a_seed(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="toy", messages=HELLO, temperature=1, n=2, seed=7, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.message.content for choice in answer.choices]

    first, second = ask(), ask()
    assert first == second
    assert first[0] != first[1]


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=HELLO, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b", "c"]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["a", "b"]


def test_stop_and_priority(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy",
        messages=HELLO,
        temperature=0,
        max_tokens=20,
        stop=["def"],
        extra_body={"priority": -1, "min_tokens": 1},
    )
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="toy", prompt=["x", "y"], temperature=0, max_tokens=3, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["xabc", "yabc"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["x", "a", "b", "c"]
    stream = client.completions.create(
        model="toy", prompt=[120, 121], temperature=0, max_tokens=3, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"model": "other"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_bad_input_raises_the_typed_error(
    client: openai.OpenAI, wrong: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "toy", "messages": HELLO, **wrong})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code == ("model_not_found" if param == "model" else None)


def test_a_wrong_key_raises_the_typed_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert client.with_options(api_key="first").models.list().data
