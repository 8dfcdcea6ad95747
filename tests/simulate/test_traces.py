"""Traces from files: what is read, what is refused and how, and what scaling does to it."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.errors import ConfigError
from layby.simulate.traces import (
    READERS,
    Trace,
    TraceError,
    TraceLines,
    TraceReader,
    TraceRequest,
    read_trace,
)

REAL_TRACES = Path(__file__).parents[2].parent / "shared" / "traces"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224671,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1025, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 4500, "input_length": 600, "output_length": 50, "hash_ids": [7, 11]}
"""


@pytest.fixture
def write(tmp_path: Path):
    """Writes a trace file under a name that says nothing of its format."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def refused(path: Path, line: int | None, *words: str, as_format: str = "auto") -> None:
    """Reading stops with an error that names the file, the line and the reason."""
    with pytest.raises(TraceError) as caught:
        read_trace(path, format=as_format)
    error = caught.value
    assert error.path == str(path)
    assert error.line == line
    assert str(path) in str(error)
    assert error.reason in str(error)
    if line is not None:
        assert f"line {line}:" in str(error)
    for word in words:
        assert word in error.reason


def lengths(trace: Trace) -> list[tuple[float, int, int]]:
    return [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests]


# --- Formats ------------------------------------------------------------------------------------


def test_azure(write):
    trace = read_trace(write(AZURE))
    assert trace.name == "trace.txt"
    # All seven decimals count, as differences of nanoseconds.
    assert lengths(trace) == [(0.0, 374, 44), (4.314579, 396, 109), (4.5418771, 879, 55)]
    assert trace.requests[0] == TraceRequest(0.0, 374, 44)


def test_burstgpt_skips_and_counts_failed_requests(write):
    trace = read_trace(write(BURSTGPT))
    assert lengths(trace) == [(0.0, 472, 18), (113.5, 417, 276)]
    assert trace.skipped == 1
    assert "1 request without an answer skipped" in trace.describe()


def test_mooncake(write):
    trace = read_trace(write(MOONCAKE))
    assert lengths(trace) == [(0.0, 1025, 5), (3.5, 600, 50)]
    assert [r.prefix for r in trace.requests] == [(7, 8, 9), (7, 11)]
    assert {r.prefix_block_tokens for r in trace.requests} == {512}


def test_mooncake_without_ids_shares_nothing(write):
    trace = read_trace(write('{"timestamp": 0, "input_length": 9, "output_length": 5}'))
    assert trace.requests == (TraceRequest(0.0, 9, 5),)


@pytest.mark.parametrize("content", [AZURE, BURSTGPT, MOONCAKE], ids=["azure", "burst", "moon"])
def test_same_trace_however_it_is_stored(write, content):
    plain = read_trace(write(content))
    for stored in (
        gzip.compress(content.encode()),
        content.replace("\n", "\r\n").encode(),
        content.rstrip("\n").encode(),
        content.replace("\n", "\n\n  \n").encode(),
        b"\xef\xbb\xbf" + content.encode(),
        b"\n" + content.encode(),
    ):
        assert read_trace(write(stored)) == plain


def test_columns_in_another_order_and_with_others_between(write):
    trace = read_trace(
        write(
            'Log Type,Session ID,Response tokens,"Timestamp", Request tokens,Elapsed time\n'
            '"API log, old",3,18,5,472,1.5\n'
        )
    )
    assert lengths(trace) == [(0.0, 472, 18)]


@pytest.mark.parametrize(
    ("text", "later_s"),
    [
        ("2024-05-10 00:00:01+00:00", 1.0),
        ("2024-05-10T00:00:00.5Z", 0.5),
        ("2024-05-10 01:30:00.000000001+01:30", 1e-9),
        ("2024-05-11 00:00:00", 86_400.0),
    ],
)
def test_azure_timestamps(write, text, later_s):
    content = AZURE.splitlines()[0] + f"\n2024-05-10 00:00:00,1,1\n{text},1,1\n"
    assert read_trace(write(content)).duration_s == later_s


def test_sorted_by_arrival_and_stable(write):
    rows = [(3, 1), (1, 2), (3, 3), (2, 4), (1, 5)]
    content = "".join(
        json.dumps({"timestamp": t * 1000, "input_length": p, "output_length": 1}) + "\n"
        for t, p in rows
    )
    trace = read_trace(write(content))
    assert [(r.arrival_s, r.num_prompt_tokens) for r in trace.requests] == [
        (0, 2),
        (0, 5),
        (1, 4),
        (2, 1),
        (2, 3),
    ]


def test_format_can_be_said(write):
    assert len(read_trace(write(AZURE), format="azure")) == 3
    refused(write(AZURE), 1, "Timestamp", "Request tokens", as_format="burstgpt")
    refused(write(AZURE), 1, "not JSON", as_format="mooncake")
    with pytest.raises(ConfigError, match=r"'csv'.*azure, burstgpt, mooncake"):
        read_trace(write(AZURE), format="csv")


def test_other_modules_can_add_a_format(write, monkeypatch):
    def read(lines: TraceLines) -> Iterator[TraceRequest]:
        for line in lines:
            event = lines.json_object(line)
            if event["e"] == "arrive":
                yield TraceRequest(
                    lines.seconds("t", event["t"]), lines.tokens("p", event["p"]), 1, n=2
                )

    monkeypatch.setitem(READERS, "layby", TraceReader("jsonl", ("e",), read))
    path = write('{"e":"start"}\n{"e":"arrive","t":1.5,"p":3}\n{"e":"arrive","t":2,"p":4}\n')
    assert lengths(read_trace(path)) == [(0.0, 3, 1), (0.5, 4, 1)]
    # What a request cannot be is told with the place as well.
    refused(write('{"e":"start"}\n{"e":"arrive","t":1.5,"p":0}\n'), 2, "num_prompt_tokens")
    # The built-in formats are recognised as before.
    assert len(read_trace(write(MOONCAKE))) == 2


# --- Bad files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-11-16 18:15:51,12", ("2 columns", "3")),
        ("2023-11-16 18:15:51,12,5,9", ("4 columns", "3")),
        ("2023-11-16 18:15:51,-12,5", ("ContextTokens", "'-12'")),
        ("2023-11-16 18:15:51,12,5.5", ("GeneratedTokens", "'5.5'")),
        ("2023-11-16 18:15:51,12,", ("GeneratedTokens", "''")),
        ("2023-11-16 18:15:51,1_2,5", ("ContextTokens", "'1_2'")),
        ("2023-11-16 18:15:51,٣,5", ("ContextTokens", "'٣'")),
        ("2023-11-16 18:15:51,nan,5", ("ContextTokens", "'nan'")),
        ("2023-11-16 18:15:51,1000000001,5", ("ContextTokens", "1,000,000,000")),
        ("2023-11-31 18:15:51,12,5", ("TIMESTAMP", "2023-11-31")),
        ("2023-11-16 25:15:51,12,5", ("TIMESTAMP", "25:15:51")),
        ("2023-11-16,12,5", ("TIMESTAMP",)),
        ("yesterday,12,5", ("TIMESTAMP", "'yesterday'")),
        ("nan,12,5", ("TIMESTAMP",)),
        (",12,5", ("TIMESTAMP",)),
        ('2023-11-16 18:15:51,"12,5', ("not CSV",)),
        ('2023-11-16 18:15:51,"12"3,5', ("not CSV",)),
    ],
)
def test_bad_azure_rows(write, row, words):
    refused(write(AZURE + row + "\n" + "2023-11-16 18:15:52,1,1\n"), 5, *words)


@pytest.mark.parametrize("time", ["nan", "inf", "-inf", "1e13", "1e999", "noon", ""])
def test_bad_burstgpt_times(write, time):
    row = f"{time},ChatGPT,1,1,2,API log\n"
    refused(write(BURSTGPT + row), 5, "Timestamp must be a finite number", repr(time))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"timestamp": 1, "input_length": 2', ("not JSON", "column 35")),
        ("[1, 2]", ("JSON object", "[1, 2]")),
        ("null", ("JSON object",)),
        ('{"input_length": 2, "output_length": 3}', ("timestamp is missing",)),
        ('{"timestamp": 1, "output_length": 3}', ("input_length is missing",)),
        ('{"timestamp": 1, "input_length": 3}', ("output_length is missing",)),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}', ("timestamp", "finite")),
        ('{"timestamp": 1e999, "input_length": 2, "output_length": 3}', ("timestamp", "finite")),
        ('{"timestamp": true, "input_length": 2, "output_length": 3}', ("timestamp", "True")),
        ('{"timestamp": null, "input_length": 2, "output_length": 3}', ("timestamp", "None")),
        ('{"timestamp": 1, "input_length": -2, "output_length": 3}', ("input_length", "-2")),
        ('{"timestamp": 1, "input_length": 2.0, "output_length": 3}', ("input_length", "2.0")),
        ('{"timestamp": 1, "input_length": 2, "output_length": true}', ("output_length", "True")),
        ('{"timestamp": 1, "input_length": 2, "output_length": [3]}', ("output_length", "[3]")),
        (
            '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": 4}',
            ("hash_ids", "4"),
        ),
        (
            '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [4.0]}',
            ("hash_ids", "[4.0]"),
        ),
        (
            '{"timestamp": 1, "input_length": 1024, "output_length": 3, "hash_ids": [4, 5, 6]}',
            ("3 prefix ids", "1024 tokens", "2 blocks of 512"),
        ),
    ],
)
def test_bad_mooncake_rows(write, row, words):
    refused(write(MOONCAKE + row + "\n" + MOONCAKE), 3, *words)


def test_values_too_large_for_anything(write):
    digits = "9" * 5000
    refused(write(AZURE + f"2023-11-16 18:15:51,{digits},5"), 5, "ContextTokens")
    refused(write(BURSTGPT + f"{digits},GPT-4,1,1,2,API log"), 5, "Timestamp")
    refused(write(BURSTGPT + f"1,{'x' * 200_000},1,1,2,API log"), 5, "field larger")
    refused(write(MOONCAKE + digits), 3, "not JSON")
    refused(write(MOONCAKE + "[" * 100_000), 3, "not JSON")
    row = f'{{"timestamp": {digits[:400]}, "input_length": 2, "output_length": 3}}'
    refused(write(MOONCAKE + row), 3, "timestamp", "bits")
    refused(write(MOONCAKE + " " * (17 * 2**20)), 3, "longer than 16,777,216 bytes")


def test_headers_with_a_column_missing(write):
    refused(write("TIMESTAMP,ContextTokens\n"), 1, "lacks GeneratedTokens")
    refused(write("Timestamp,Model,Request tokens\n"), 1, "lacks Response tokens")
    refused(write('{"timestamp": 1, "input_length": 4}'), 1, "output_length is missing")


@pytest.mark.parametrize(
    "first", ["when,prompt,answer", "2023-11-16 18:15:46.68,374,44", '{"a": 1}', "[1]", "<html>"]
)
def test_unknown_formats_are_told_the_known_ones(write, first):
    refused(write(first + "\n"), 1, "azure", "ContextTokens", "burstgpt", "mooncake", first)


def test_broken_first_line_of_json(write):
    refused(write('{"timestamp": 1, "input'), 1, "not JSON")


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"", mtime=0)])
def test_empty_files(write, content):
    refused(write(content), None, "empty")


def test_files_without_a_request_that_could_run(write):
    refused(write(AZURE.splitlines()[0]), None, "no request")
    refused(write("\n".join(BURSTGPT.splitlines()[::2])), None, "1 request without an answer")


def test_not_utf8(write):
    refused(write(AZURE.encode() + b"2023-11-16 18:15:51,1\xff2,5\n"), 5, "UTF-8", "0xff")
    refused(write(AZURE.encode("utf-16")), 1, "UTF-8")


def test_broken_gzip(write):
    num_lines = 4000
    header, row = AZURE.splitlines()[:2]
    packed = gzip.compress("\n".join([header] + [row] * (num_lines - 1)).encode())
    refused(write(packed[:-4]), num_lines, "cannot be read", "end-of-stream")
    damaged = packed[:-8] + b"\0" * 8  # the checksum and the length
    refused(write(damaged), num_lines, "cannot be read", "CRC")
    refused(write(packed[:2] + b"nonsense"), 1, "cannot be read")


@given(
    content=st.sampled_from([AZURE, BURSTGPT, MOONCAKE]),
    at=st.integers(0, 400),
    cut=st.integers(0, 20),
    junk=st.binary(max_size=8) | st.text('0123456789-.,:"{}[]en \n', max_size=8).map(str.encode),
    packed=st.booleans(),
)
def test_damaged_files_are_read_or_refused_and_nothing_else(
    tmp_path_factory, content, at, cut, junk, packed
):
    path = tmp_path_factory.getbasetemp() / "damaged"
    data = gzip.compress(content.encode()) if packed else content.encode()
    path.write_bytes(data[:at] + junk + data[at + cut :])
    with suppress(TraceError):
        assert read_trace(path).requests[0].arrival_s == 0.0


def test_missing_files_and_folders(tmp_path):
    refused(tmp_path / "none.csv", None, "No such file")
    refused(tmp_path, None, "directory")


# --- Requests and traces -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_output_tokens": 0}, "num_output_tokens"),
        ({"num_output_tokens": 10**9 + 1}, "num_output_tokens"),
        ({"n": 0}, "n must"),
        ({"arrival_s": math.nan}, "arrival_s"),
        ({"arrival_s": math.inf}, "arrival_s"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"prefix": (1,)}, "prefix_block_tokens"),
        ({"prefix": (1, 2, 3), "prefix_block_tokens": 5}, "2 blocks of 5"),
    ],
)
def test_impossible_requests(change, word):
    values = {"arrival_s": 0.0, "num_prompt_tokens": 10, "num_output_tokens": 5} | change
    with pytest.raises(ConfigError, match=word):
        TraceRequest(**values)


def test_a_trace_starts_at_zero_and_tells_its_totals():
    trace = Trace("t", [TraceRequest(12.0, 10, 5, n=2), TraceRequest(10.0, 1, 2)])
    assert [r.arrival_s for r in trace.requests] == [0.0, 2.0]
    assert len(trace) == 2
    assert trace.duration_s == 2.0
    assert trace.num_prompt_tokens == 11
    assert trace.num_output_tokens == 12
    assert trace.describe() == (
        "t: 2 requests in 2 s (1/s), 11 prompt tokens (mean 6), 12 output tokens (mean 6)"
    )
    assert Trace("none", ()).describe() == "none: no requests"


def test_rate_scale_and_max_requests(write):
    trace = read_trace(write(AZURE))
    denser = trace.scaled(rate_scale=2)
    assert [r.arrival_s * 2 for r in denser.requests] == [r.arrival_s for r in trace.requests]
    assert trace.scaled(max_requests=2).requests == trace.requests[:2]
    assert trace.scaled(max_requests=9) == trace
    assert trace.scaled() == trace


def test_length_scale():
    trace = Trace("t", [TraceRequest(0.0, 10, 1, max_tokens=100, n=3, request_id="a", priority=4)])
    (half,) = trace.scaled(length_scale=0.5).requests
    assert half == TraceRequest(0.0, 5, 1, max_tokens=50, n=3, request_id="a", priority=4)
    (tiny,) = trace.scaled(length_scale=1e-9).requests
    assert (tiny.num_prompt_tokens, tiny.num_output_tokens, tiny.max_tokens) == (1, 1, 1)
    (large,) = trace.scaled(length_scale=2).requests
    assert (large.num_prompt_tokens, large.num_output_tokens, large.max_tokens) == (20, 2, 200)


@pytest.mark.parametrize("scale", [0.25, 0.5, 2.0])
def test_the_same_share_of_a_prompt_is_shared_after_scaling(scale):
    """Cutting prompts without their blocks would make short prompts all prefix."""
    trace = Trace(
        "t", [TraceRequest(0.0, 8 * 512, 1, prefix=(0, 1, 2, 3), prefix_block_tokens=512)]
    )
    (scaled,) = trace.scaled(length_scale=scale).requests
    assert scaled.prefix == (0, 1, 2, 3)
    assert len(scaled.prefix) * scaled.prefix_block_tokens / scaled.num_prompt_tokens == 0.5


@given(
    prompt=st.integers(1, 5000),
    block=st.integers(1, 600),
    scale=st.floats(0.001, 20),
    ids=st.integers(0, 20),
)
def test_scaled_prefixes_fit_their_prompts(prompt, block, scale, ids):
    prefix = tuple(range(min(ids, -(-prompt // block))))
    request = TraceRequest(0.0, prompt, 1, prefix=prefix, prefix_block_tokens=block)
    scaled = request.scaled(scale)  # which checks that no id lies beyond the prompt
    assert scaled.num_prompt_tokens == max(1, round(prompt * scale))
    assert scaled.prefix == prefix[: len(scaled.prefix)]
    lost = len(prefix) - len(scaled.prefix)
    if lost:  # only because a block was rounded up or the prompt down, and no more than must be
        was_rounded = (
            scaled.prefix_block_tokens > block * scale or scaled.num_prompt_tokens < prompt * scale
        )
        assert was_rounded or prompt * scale < len(prefix)
        assert len(scaled.prefix) * scaled.prefix_block_tokens >= scaled.num_prompt_tokens


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rate_scale": 0}, "rate_scale"),
        ({"rate_scale": math.nan}, "rate_scale"),
        ({"length_scale": -1}, "length_scale"),
        ({"length_scale": math.inf}, "length_scale"),
        ({"length_scale": 1e300}, "num_prompt_tokens"),
        ({"max_requests": 0}, "max_requests"),
    ],
)
def test_impossible_scales(write, change, word):
    with pytest.raises(ConfigError, match=word):
        read_trace(write(MOONCAKE)).scaled(**change)


# --- The real ones ------------------------------------------------------------------------------


def real(name: str) -> Trace:
    path = REAL_TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return read_trace(path)


def test_the_azure_hour():
    trace = real("azure_llm_2023_conv.csv")
    assert len(trace) == 19_366
    assert trace.skipped == 0
    assert trace.num_output_tokens == 4_088_665
    assert trace.num_prompt_tokens == 22_361_870
    assert trace.duration_s == pytest.approx(3501.72, abs=0.01)


def test_the_mooncake_hour():
    trace = real("mooncake_conversation.jsonl")
    assert len(trace) == 12_031
    assert trace.num_output_tokens == 4_122_048
    assert all(
        len(r.prefix) == math.ceil(r.num_prompt_tokens / 512) and r.prefix[0] == 0
        for r in trace.requests
    )
    assert len(trace.scaled(length_scale=0.3)) == 12_031
