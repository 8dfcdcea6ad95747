"""What a stream says, joined, is what the whole answer says; nothing leaks and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations, pairwise
from typing import Any

import pytest

from layby.engine.toy import ByteTokenizer
from tests.server.harness import AlphabetExecutor, events, in_process, make_engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def both_ways(
    path: str,
    body: dict[str, Any],
    executor: AlphabetExecutor | None = None,
    tokenizer: ByteTokenizer | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same call whole and as a stream with usage: the answer, and the events."""

    async def run() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        engine = make_engine(executor, tokenizer=tokenizer)
        async with in_process(engine) as client:
            whole = await client.post(path, json=body)
            assert whole.status_code == 200, whole.text
            stream = await client.post(
                path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
            )
            assert stream.headers["content-type"].startswith("text/event-stream")
            return whole.json(), events(stream.text)

    return asyncio.run(run())


def pieces(stream: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [c for event in stream for c in event["choices"] if c["index"] == index]


def check_agreement(whole: dict[str, Any], stream: list[dict[str, Any]]) -> list[str]:
    """Stream and whole answer agree in texts, ends, log-probabilities and usage; the texts."""
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in stream[:-1])
    texts = []
    for choice in whole["choices"]:
        parts = pieces(stream, choice["index"])
        texts.append(choice["text"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        ends = [part["finish_reason"] for part in parts if part["finish_reason"]]
        assert ends == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                streamed = [part["logprobs"] for part in parts if part["logprobs"]]
                assert [v for lists in streamed for v in lists[name]] == values
    return texts


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "reason"),
    [
        ("DEFGHIJ", 20, "ABC", "stop"),
        ("DEFGHIX", 8, "ABCDEFGH", "length"),  # a near miss, still possible at the end
        ("DEFGX", 10, "ABCDEFGHIJ", "length"),  # a near miss that ends in the middle
        ("DEFGHIJ", 6, "ABCDEF", "length"),  # the limit, while DEF is held back
        (["DEF", "DEFGHIJ"], 20, "ABC", "stop"),  # one begins the other
        (["BCDEX", "CD"], 20, "AB", "stop"),
        ("A", 20, "", "stop"),
    ],
)
def test_case_12_stop_strings_across_tokens(
    stop: str | list[str], max_tokens: int, text: str, reason: str
) -> None:
    """vllm#3574: parts of a stop string were streamed before it was complete."""
    body = {"prompt": "x", "temperature": 0, "max_tokens": max_tokens, "stop": stop, "logprobs": 1}
    whole, stream = both_ways(COMPLETIONS, body, AlphabetExecutor(list(b"ABCDEFGHIJ")))
    assert check_agreement(whole, stream) == [text]
    [choice] = whole["choices"]
    assert choice["finish_reason"] == reason
    assert (choice["stop_reason"] is not None) == (reason == "stop")
    # Text may be held back or dropped; tokens and their numbers are all reported.
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]


TEXT = "a你好🎉é"


@pytest.mark.parametrize("cuts", [*combinations(range(1, 13), 1), (2, 3, 5, 8, 9, 12)])
def test_case_13_characters_split_over_tokens(cuts: tuple[int, ...]) -> None:
    """llama.cpp#4036: half characters were streamed as U+FFFD. Here n=2, in various splits."""
    raw = TEXT.encode()
    bounds = [0, *cuts, len(raw)]
    parts = [raw[a:b] for a, b in pairwise(bounds)]
    tokenizer = ByteTokenizer(pieces=parts)
    executor = AlphabetExecutor([258 + number for number in range(len(parts))])
    body = {"prompt": "x", "temperature": 0, "max_tokens": len(parts), "n": 2, "logprobs": 0}
    whole, stream = both_ways(COMPLETIONS, body, executor, tokenizer)
    assert check_agreement(whole, stream) == [TEXT, TEXT]
    assert whole["usage"]["completion_tokens"] == 2 * len(parts)
    assert "\ufffd" not in json.dumps(stream, ensure_ascii=False).replace("bytes:", "")


@pytest.mark.parametrize("max_tokens", [8, 9, 10])
def test_case_13_an_answer_cut_inside_a_character(max_tokens: int) -> None:
    """The end is handled alike in both modes; usage counts tokens, not characters."""
    body = {"prompt": "x", "temperature": 0, "max_tokens": max_tokens, "n": 2, "logprobs": 0}
    whole, stream = both_ways(COMPLETIONS, body, AlphabetExecutor(list(TEXT.encode())))
    texts = check_agreement(whole, stream)
    assert texts == [TEXT.encode()[:max_tokens].decode(errors="replace")] * 2
    assert whole["usage"]["completion_tokens"] == 2 * max_tokens
    for piece in pieces(stream, 0)[:-1]:
        assert "\ufffd" not in piece["text"]


def test_a_chat_stream_names_the_role_first_and_ends_each_choice_once() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 5,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole, stream = both_ways(CHAT, body)
    assert len({event["id"] for event in stream}) == 1
    for choice in whole["choices"]:
        parts = pieces(stream, choice["index"])
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"] == "abcde"
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]
        content = [entry for p in parts if p["logprobs"] for entry in p["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[byte] for byte in b"abcde"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert whole["usage"] == {"prompt_tokens": 19, "completion_tokens": 15, "total_tokens": 34}
    assert stream[-1]["usage"] == whole["usage"]


def test_a_list_of_prompts_gives_choices_prompt_by_prompt() -> None:
    body = {"prompt": ["p", "qq", "rrr"], "temperature": 0, "max_tokens": 2, "n": 2, "echo": True}
    whole, stream = both_ways(COMPLETIONS, body)
    assert check_agreement(whole, stream) == ["pab", "pab", "qqab", "qqab", "rrrab", "rrrab"]
    # Each prompt counts once, whatever n; every sample's tokens count.
    assert whole["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}


def test_an_echo_with_logprobs_covers_the_prompt() -> None:
    body = {"prompt": "hé!", "temperature": 0, "max_tokens": 2, "logprobs": 2, "echo": True}
    whole, stream = both_ways(COMPLETIONS, body)
    assert check_agreement(whole, stream) == ["hé!ab"]
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "a", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])


def test_an_echo_of_token_ids_is_their_text() -> None:
    body = {"prompt": list(b"ids"), "temperature": 0, "max_tokens": 1, "logprobs": 0, "echo": True}
    whole, stream = both_ways(COMPLETIONS, body)
    assert check_agreement(whole, stream) == ["idsa"]
    assert whole["choices"][0]["logprobs"]["tokens"] == ["i", "d", "s", "a"]


def test_a_stream_without_usage_has_no_such_key() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            stream = events((await client.post(COMPLETIONS, json=body)).text)
            assert all("usage" not in event and event["choices"] for event in stream)

    asyncio.run(run())


def test_events_hold_no_character_at_which_clients_split_lines() -> None:
    """U+2028, U+0085 and the like are line ends to ``str.splitlines``, on which clients rely."""
    text = "one\u2028two\u0085three\x1cfour"
    executor = AlphabetExecutor(list(text.encode()))
    body = {"prompt": text, "temperature": 0, "max_tokens": len(text.encode()), "echo": True}

    async def run() -> None:
        async with in_process(make_engine(executor)) as client:
            stream = (await client.post(COMPLETIONS, json={**body, "stream": True})).text
            assert stream.splitlines() == stream.split("\n")[:-1]
            joined = "".join(event["choices"][0]["text"] for event in events(stream))
            assert joined == text + text

    asyncio.run(run())


def test_a_token_that_stops_is_reported_and_counted_but_not_shown() -> None:
    executor = AlphabetExecutor([*b"abc", ByteTokenizer.EOS])
    body = {"prompt": "x", "temperature": 0, "max_tokens": 9, "logprobs": 0}
    whole, stream = both_ways(COMPLETIONS, body, executor)
    assert check_agreement(whole, stream) == ["abc"]
    assert whole["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "</s>"]
    assert whole["usage"]["completion_tokens"] == 4
    whole, stream = both_ways(COMPLETIONS, {**body, "stop_token_ids": [98]}, executor)
    assert check_agreement(whole, stream) == ["a"]
    assert whole["choices"][0]["stop_reason"] == 98
    whole, _ = both_ways(COMPLETIONS, {**body, "ignore_eos": True}, executor)
    assert whole["usage"]["completion_tokens"] == 9


def test_text_parts_are_joined_and_a_developer_is_the_system() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
            messages = [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": parts},
            ]
            answer = (await client.post("/tokenize", json={"messages": messages})).json()
            text = bytes(answer["tokens"]).decode()
            assert text == "system: be brief\nuser: one\ntwo\nassistant:"
            back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
            assert back.json() == {"prompt": text}

    asyncio.run(run())
