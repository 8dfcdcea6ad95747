"""A server whose disk fails all the time: every answer is that of one that was never disturbed."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from layby.models import LoadedModel
from tests.e2e.serving import serving
from tests.engine.harness import metric

pytestmark = pytest.mark.slow

STREAMS = 16
FAULTS = (
    "disk.read=eio:0.2,disk.read=short:0.2,disk.read=corrupt:0.2,"
    "disk.write=eio:0.1,disk.write=short:0.1,disk.write=enospc:0.2"
)
"""Three in five reads, and two in five writes."""


def ask(number: int) -> dict[str, Any]:
    """Each more urgent than the one before, so that those are parked."""
    return {
        "prompt": [1000 + 37 * number + place for place in range(40)],
        "max_tokens": 75,
        "seed": number,
        "priority": STREAMS - number,
        "stream": True,
        "ignore_eos": True,
    }


def texts(url: str) -> list[str]:
    """The answers; every call is made when the one before has its first token."""
    under_way = [threading.Event() for _ in range(STREAMS)]

    def read(number: int) -> str:
        with httpx.stream("POST", f"{url}/v1/completions", json=ask(number), timeout=120) as answer:
            assert answer.status_code == 200
            text = ""
            lines = [line for line in _shown(answer, under_way[number]) if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["text"]
        assert choice["finish_reason"] == "length"
        return text

    with ThreadPoolExecutor(STREAMS) as callers:
        calls = []
        for number in range(STREAMS):
            calls.append(callers.submit(read, number))
            assert under_way[number].wait(60)
        return [call.result() for call in calls]


def _shown(answer: httpx.Response, under_way: threading.Event) -> list[str]:
    lines = []
    for line in answer.iter_lines():
        lines.append(line)
        under_way.set()
    return lines


def faults(told: bytes) -> float:
    """Transfers that failed, of whatever kind."""
    found = re.findall(rb"^layby_swap_faults_total\{.*\} (\S+)$", told, re.MULTILINE)
    return sum(map(float, found))


def test_sixteen_streams_over_a_failing_disk_say_what_they_would_have_said(
    smollm2: LoadedModel, tmp_path: Path
) -> None:
    """One fault must cost one recompute: nobody else, and no token of the answer."""
    with serving(tmp_path / "calm", "--num-blocks", "400", "--swap-gib", "0") as url:
        wanted = texts(url)
    assert len(set(wanted)) == STREAMS
    small = ("--num-blocks", "18", "--num-swap-blocks", "8", "--preemption-mode", "swap")
    disk = ("--swap-dir", str(tmp_path), "--swap-disk-gib", "0.1")
    with serving(tmp_path / "log", *small, *disk, LAYBY_FAULTS=FAULTS) as url:
        assert texts(url) == wanted
        told = httpx.get(f"{url}/metrics").content
    losses = metric(told, "layby_kv_losses_total")
    log = (tmp_path / "log").read_text()
    assert log.count("could not be moved to or from disk") == faults(told)
    assert log.count("will be recomputed") == losses > 0  # reads failed
    assert log.count("it stays in RAM") > 0  # and writes
    assert metric(told, "layby_recomputed_tokens_total") > 0
    assert metric(told, "layby_swap_usage", tier="disk") == 0
    assert metric(told, "vllm:num_requests_swapped") == 0
    assert "Traceback" not in log
