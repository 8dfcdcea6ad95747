"""Chat templates: what they render, what they refuse, and what they cannot do to the process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from layby.errors import InvalidRequestError
from layby.models.chat_template import ChatTemplate
from layby.models.gguf_file import GgufFile

USER = [{"role": "user", "content": "hi"}]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens=special)


def test_the_default_model_gets_its_chatml_prompt(smollm2_gguf: GgufFile) -> None:
    chat = ChatTemplate.from_gguf(smollm2_gguf)
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert chat.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.render(messages, add_generation_prompt=False).endswith("hi<|im_end|>\n")
    assert chat.render(USER).startswith("<|im_start|>system\nYou are a helpful AI assistant")


RICH = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'system'] %}
        {{- raise_exception('bad role') }}
    {%- endif %}
    {%- if loop.first %}[{{ loop.length }}]{% endif %}
    {% if message.content == 'skip' %}
        {% continue %}
    {% endif %}
    {{ message.role | upper }}: {% generation %}{{ message.content | trim }}{% endgeneration %}
    {% if not loop.last %};{% endif %}
{% endfor %}
{{ tools | tojson(indent=2) }} {{ {'a': '<é>'} | tojson }} {{ missing }}
{%- if add_generation_prompt %} go{% endif %}{{ eos_token }}
"""


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<"}}]])
def test_rendering_equals_transformers(tmp_path: Path, tools: list[dict[str, Any]] | None) -> None:
    """White space, loop controls, JSON without HTML escapes, undefined names, special tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(["<s>", "</s>"])
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=RICH
    )
    oracle.save_pretrained(tmp_path)
    chat = ChatTemplate.from_directory(tmp_path)
    messages = [*USER, {"role": "assistant", "content": "skip"}, {"role": "user", "content": " é "}]
    for generation in (True, False):
        expected = oracle.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation
        )
        assert chat.render(messages, generation, tools=tools) == expected


def test_a_template_file_wins_over_the_tokenizers_configuration(tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": "from config", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file {{ bos_token }}")
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "from file <s>"


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert chat.render(USER) == "plain"
    assert chat.render(USER, tools=[{"type": "function"}]) == "with tools"


def test_further_variables_reach_the_template() -> None:
    chat = template("{{ 'think' if enable_thinking else 'answer' }}")
    assert chat.render(USER, enable_thinking=True) == "think"


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    chat = template("{{ messages[0].content }}")
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.render([{"role": "user", "content": parts}]) == "a\nb"
    parts.append({"type": "image_url", "image_url": {"url": "x"}})
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].*image_url") as caught:
        chat.render([{"role": "user", "content": parts}])
    assert caught.value.param == "messages"


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    chat = template("{{ messages[0].tool_calls[0].function.arguments.x }}")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert chat.render([message]) == "7"


@pytest.mark.parametrize(
    "messages",
    [[], ["hi"], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}]],
)
def test_malformed_messages_are_the_requests_fault(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="messages") as caught:
        template("x").render(messages)
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    chat = ChatTemplate.from_directory(tmp_path)
    assert not chat.available
    with pytest.raises(InvalidRequestError, match="no chat template"):
        chat.render(USER)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% for %}", "template failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safe|unsafe"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "large|big"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{{ 'a' * 10000000000 }}", "too large"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_or_misbehaves_is_an_error_of_the_request(
    source: str, reason: str
) -> None:
    """None of these may end or stall the process."""
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"
    assert time.monotonic() - start < 20


def test_a_requests_variables_cannot_lift_the_bound_on_loops() -> None:
    source = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="steps"):
        template(source).render(USER, layby_steps_taken=[-(10**9)])


def test_the_bound_on_loops_starts_anew_with_each_rendering() -> None:
    chat = template("{% for a in range(60) %}{% for b in range(9000) %}{% endfor %}{% endfor %}ok")
    assert [chat.render(USER) for _ in range(2)] == ["ok", "ok"]
