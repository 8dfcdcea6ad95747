"""SentencePiece puts a space in front of a text; an answer that is a text of its own has none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layby.engine.detokenizer import Detokenizer, StopStrings
from layby.engine.toy import ByteTokenizer
from layby.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import metaspace, save, sentencepiece_like
from tests.server.harness import AlphabetExecutor, events, in_process, make_engine

TEXTS = ["Hello world", " Hello", "  two spaces", "é🎉", "", " ", "\nnew line", "1 + 1 = 2"]


def streamed(tokenizer: Tokenizer, ids: list[int], *, begins_text: bool) -> str:
    """What a stream of single tokens adds up to."""
    text = Detokenizer(tokenizer, StopStrings(()), begins_text=begins_text)
    return "".join(text.push([token]) for token in ids) + text.flush()


@pytest.mark.parametrize("make", [sentencepiece_like, metaspace])
def test_a_streamed_answer_is_what_transformers_makes_of_its_tokens(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """Chat answers of such models began with a space, streamed or not."""
    oracle = save(tmp_path, make())
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.strips_leading_space
    bos = tokenizer.encode("")[:1]  # a special token in front changes nothing
    for answer in TEXTS:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        for whole in (ids, [*bos, *ids]):
            told = streamed(tokenizer, whole, begins_text=True)
            assert told == oracle.decode(whole, skip_special_tokens=True)
            assert told == tokenizer.decode(whole)


@pytest.mark.parametrize("make", [sentencepiece_like, metaspace])
def test_a_streamed_continuation_is_what_transformers_adds_to_the_prompt(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """Without its space it would be glued to the prompt's last word."""
    oracle = save(tmp_path, make())
    tokenizer = Tokenizer.from_directory(tmp_path)
    prompt = tokenizer.encode("The capital is", add_special_tokens=False)
    for answer in TEXTS:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        whole = oracle.decode([*prompt, *ids])
        assert oracle.decode(prompt) + streamed(tokenizer, ids, begins_text=False) == whole


class SpacedTokenizer(ByteTokenizer):
    """Says of its spaces what SentencePiece does."""

    strips_leading_space = True


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answers_without_the_space_and_a_completion_goes_on_with_it(stream: bool) -> None:
    async def run() -> None:
        engine = make_engine(AlphabetExecutor(list(b" hello")), tokenizer=SpacedTokenizer())
        async with in_process(engine) as client:
            limits = {"max_tokens": 6, "temperature": 0, "stream": stream}
            said = {"messages": [{"role": "user", "content": "hi"}], **limits}
            chat = await client.post("/v1/chat/completions", json=said)
            completion = await client.post("/v1/completions", json={"prompt": "hi", **limits})
            if stream:
                pieces = [event["choices"][0]["delta"] for event in events(chat.text)]
                assert "".join(piece.get("content") or "" for piece in pieces) == "hello"
                texts = [event["choices"][0]["text"] for event in events(completion.text)]
                assert "".join(texts) == " hello"
            else:
                assert chat.json()["choices"][0]["message"]["content"] == "hello"
                assert completion.json()["choices"][0]["text"] == " hello"

    asyncio.run(run())
