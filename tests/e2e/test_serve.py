"""The command people type, the default model, and the official client."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from layby.models import LoadedModel
from tests.e2e.serving import LAYBY, serving

pytestmark = pytest.mark.slow

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def server(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pool so small that parking happens."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "--num-blocks", "40", "--swap-gib", "0.2") as url:
        yield url
    assert re.search(rf"curl .*{url}/v1/chat/completions", log.read_text())
    assert f"{url}/docs" in log.read_text()


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_answers_and_streams_the_same_answer(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    answer = client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, stream=True
    )
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert streamed == answer.choices[0].message.content


def test_samples_seeds_logprobs_stops_and_priorities(client: openai.OpenAI) -> None:
    def ask() -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Name a colour."}],
            n=2,
            seed=11,
            max_tokens=12,
            logprobs=True,
            top_logprobs=2,
            extra_body={"priority": 3},
        )

    first, second = ask(), ask()
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert first.choices[0].message.content != first.choices[1].message.content
    assert first.usage is not None
    logged = [choice.logprobs.content or [] for choice in first.choices if choice.logprobs]
    assert sum(map(len, logged)) == first.usage.completion_tokens
    stopped = client.completions.create(
        model="smollm2", prompt="one, two, three, four,", max_tokens=40, temperature=0, stop=" six"
    )
    assert "five" in stopped.choices[0].text
    assert "six" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_bad_input_is_a_typed_error_that_names_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="smollm2", messages=CAPITAL, top_p=0)
    assert refusal.value.param == "top_p"


def test_a_burst_is_parked_and_shows_in_the_metrics(server: str, client: openai.OpenAI) -> None:
    """Four answers of 20 blocks in a pool of 40."""
    streams = [
        client.completions.create(
            model="smollm2",
            prompt=[1000 + number] * 40,
            max_tokens=270,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number in range(4)
    ]
    lengths = [sum(1 for _ in stream) for stream in streams]
    assert all(length > 0 for length in lengths)
    metrics = httpx.get(f"{server}/metrics").text
    swaps = re.search(r'layby_preemptions_total\{mode="swap"\} (\S+)', metrics)
    assert swaps is not None
    assert float(swaps[1]) > 0
    assert "layby_recomputed_tokens_total 0.0" in metrics
    assert "layby_swapped_queue_size 0.0" in metrics


def test_the_first_token_comes_within_five_seconds_of_process_start(
    smollm2: LoadedModel, tmp_path: Path
) -> None:
    """The best of three, because other work on the machine is not the engine's fault."""
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = subprocess.run(
            [LAYBY, "generate", "hi", "--max-tokens", "1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"NO_COLOR": "1"},
        )
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
    assert min(seconds) <= 5.0, seconds
