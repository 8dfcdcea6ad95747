"""Traces: which requests come when, and how long they are.

    trace = read_trace("azure_llm_2023_conv.csv").scaled(rate_scale=2, max_requests=1000)

| format     | what a file looks like                                                         |
|------------|--------------------------------------------------------------------------------|
| `azure`    | CSV with `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`       |
| `burstgpt` | CSV with `Timestamp` (seconds), `Request tokens`, `Response tokens`            |
| `mooncake` | JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`  |

A file's format is read off its first line, never off its name. CSV columns may come in any order
and with others between them; a file may be compressed with gzip. A line that cannot be read stops
with a ``TraceError``; a row without a prompt or without an answer is a request that failed, and is
skipped and counted. Other modules add formats to ``READERS``.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self, cast

from layby.errors import ConfigError, LaybyError, counted, shown

if TYPE_CHECKING:
    from layby.simulate.resizes import PoolResize, RecordedPools

MAX_TOKENS = 10**9  # of one prompt or answer; what is longer is a broken row
_MAX_S = 1e12  # the same for a time: 30,000 years
_MAX_LINE_BYTES = 16 * 2**20
_MOONCAKE_BLOCK_TOKENS = 512
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(LaybyError):
    """A trace that cannot be read.

    ``path`` is the file, ``line`` the number of the line at fault (from 1; None: the file as a
    whole), ``reason`` what is wrong with it. The message says all three.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str) -> None:
        where = "" if line is None else f", line {line}"
        super().__init__(f"{path}{where}: {reason}")
        self.path = str(path)
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: When it comes, in seconds on the trace's clock.
        num_prompt_tokens: Length of its prompt, at least 1.
        num_output_tokens: Length of the answer of each sample, at least 1.
        priority: Its class; a smaller number is more urgent.
        prefix: Ids of the prompt's first blocks, in order. Where two requests of a trace have equal
            leading ids, their prompts begin with equal tokens. The last block may be partial; what
            no id covers is the request's own.
        prefix_block_tokens: Tokens of one such block; 0 without a prefix.
        max_tokens: What the caller allowed where the answer ended earlier; None: the answer took
            all it was allowed.
        n: Samples drawn of the prompt.
        request_id: Its name in a recording.

    Raises:
        ConfigError: A number is out of range, or there are more ids than the prompt has blocks.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    max_tokens: int | None = None
    n: int = 1
    request_id: str | None = None

    def __post_init__(self) -> None:
        counts = (self.num_prompt_tokens, self.num_output_tokens, self.n)
        if min(counts) < 1 or max(counts) > MAX_TOKENS:
            raise ConfigError(
                f"num_prompt_tokens, num_output_tokens and n must be from 1 to {MAX_TOKENS:,}, "
                f"got {', '.join(map(shown, counts))}"
            )
        if not abs(self.arrival_s) <= _MAX_S:  # so that NaN fails too
            raise ConfigError(f"arrival_s must be a finite number, got {shown(self.arrival_s)}")
        if self.max_tokens is not None and self.max_tokens < self.num_output_tokens:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) is less than the answer's "
                f"{counted(self.num_output_tokens, 'token')}"
            )
        if self.prefix:
            if self.prefix_block_tokens < 1:
                raise ConfigError(
                    f"prefix_block_tokens must be at least 1, got {self.prefix_block_tokens}"
                )
            num_blocks = _ceil_div(self.num_prompt_tokens, self.prefix_block_tokens)
            if len(self.prefix) > num_blocks:
                raise ConfigError(
                    f"{len(self.prefix)} prefix ids for a prompt of "
                    f"{counted(self.num_prompt_tokens, 'token')}, which has "
                    f"{counted(num_blocks, 'block')} of {self.prefix_block_tokens}"
                )

    def scaled(self, length_scale: float) -> TraceRequest:
        """The same request with other lengths; ``Trace.scaled`` says how."""
        num_prompt = _scale(self.num_prompt_tokens, length_scale)
        num_output = _scale(self.num_output_tokens, length_scale)
        prefix, block_tokens = self.prefix, self.prefix_block_tokens
        if prefix:
            block_tokens = _scale(block_tokens, length_scale)
            prefix = prefix[: _ceil_div(num_prompt, block_tokens)]
        return replace(
            self,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            prefix=prefix,
            prefix_block_tokens=block_tokens,
            max_tokens=None
            if self.max_tokens is None
            else max(num_output, _scale(self.max_tokens, length_scale)),
        )


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they come; the first comes at 0 s.

    Attributes:
        name: What a report calls it: a file's name, or how it was made.
        requests: Given in any order and on any clock. Kept sorted by arrival (those that come at
            the same time stay in the order given), with the first arrival moved to 0.
        skipped: Rows of the file that were requests without a prompt or without an answer.
        resizes: When the device pool got another size meanwhile, on the requests' clock, in order.
            What came before the first arrival comes with it.
        pools: Sizes that a recorded server's pools had to begin with; None: nothing is known.
    """

    name: str
    requests: Sequence[TraceRequest]
    skipped: int = 0
    resizes: Sequence[PoolResize] = ()
    pools: RecordedPools | None = None

    def __post_init__(self) -> None:
        requests = tuple(self.requests)
        resizes = tuple(self.resizes)
        if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(requests)):
            requests = tuple(sorted(requests, key=attrgetter("arrival_s")))
        if requests and (start := requests[0].arrival_s) != 0.0:
            requests = tuple(
                replace(request, arrival_s=request.arrival_s - start) for request in requests
            )
            resizes = tuple(replace(each, at_s=max(0.0, each.at_s - start)) for each in resizes)
        object.__setattr__(self, "resizes", resizes)
        object.__setattr__(self, "requests", requests)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        """First arrival to last, in seconds."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all samples of all requests."""
        return sum(request.num_output_tokens * request.n for request in self.requests)

    def scaled(
        self,
        *,
        rate_scale: float = 1.0,
        length_scale: float = 1.0,
        max_requests: int | None = None,
    ) -> Self:
        """The same trace, denser, longer or cut short.

        Prefix blocks are scaled with the prompts: half the prompt in blocks of half the size has
        the same ids, so that requests go on sharing the same part of their prompts. Where a block's
        size is not a whole number after scaling it is rounded, and an id that then lies beyond the
        end of the prompt is dropped.

        Args:
            rate_scale: How many times as densely all comes: 2 halves every gap.
            length_scale: Factor of all lengths (prompt, answer, allowed answer), each rounded and
                at least 1 token.
            max_requests: Keep the first so many requests; None keeps all.

        Raises:
            ConfigError: A factor is not a positive number, ``max_requests`` is below 1, or a scaled
                length is out of range.
        """
        for name, factor in (("rate_scale", rate_scale), ("length_scale", length_scale)):
            if not 0 < factor < math.inf:
                raise ConfigError(f"{name} must be a positive finite number, got {factor!r}")
        if max_requests is not None and max_requests < 1:
            raise ConfigError(f"max_requests must be at least 1, got {max_requests}")
        requests = self.requests[:max_requests]
        if length_scale != 1.0:
            requests = [request.scaled(length_scale) for request in requests]
        if rate_scale != 1.0:
            requests = [replace(each, arrival_s=each.arrival_s / rate_scale) for each in requests]
        resizes = [replace(each, at_s=each.at_s / rate_scale) for each in self.resizes]
        return replace(self, requests=requests, resizes=resizes)

    def describe(self) -> str:
        """The trace in one line, for people."""
        if not self.requests:
            return f"{self.name}: no requests"
        number = len(self.requests)
        text = f"{self.name}: {number:,} {'request' if number == 1 else 'requests'}"
        if self.duration_s > 0:
            text += f" in {_time(self.duration_s)} ({number / self.duration_s:.3g}/s)"
        for what, tokens in (
            ("prompt", self.num_prompt_tokens),
            ("output", self.num_output_tokens),
        ):
            text += f", {tokens:,} {what} tokens (mean {tokens / number:,.0f})"
        if self.skipped:
            text += f"; {counted(self.skipped, 'request')} without an answer skipped"
        return text


class TraceLines(Iterator[str]):
    """The lines of a trace file that are not blank, and how to complain about the one just read.

    Attributes:
        path: The file, as errors name it.
        number: Number of the line just read, from 1; 0 before the first.
        skipped: What a reader counts as failed requests.
        resizes: What it has found of the device pool's size, in order.
        pools: What the pools were to begin with.
    """

    def __init__(self, path: str | Path, file: IO[bytes]) -> None:
        self.path = path
        self.number = 0
        self.skipped = 0
        self.resizes: list[PoolResize] = []
        self.pools: RecordedPools | None = None
        self._file = file
        self._pending: str | None = None

    def __next__(self) -> str:
        if self._pending is not None:
            line, self._pending = self._pending, None
            return line
        while True:
            try:
                raw = self._file.readline(_MAX_LINE_BYTES + 1)
            except (OSError, EOFError, zlib.error) as error:  # a broken disk, or broken gzip
                raise self.error(f"cannot be read: {error}", line=self.number + 1) from None
            if not raw:
                raise StopIteration
            self.number += 1
            if len(raw) > _MAX_LINE_BYTES:
                raise self.error(f"the line is longer than {_MAX_LINE_BYTES:,} bytes")
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                raise self.error(
                    f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start + 1}"
                ) from None
            if self.number == 1:
                line = line.removeprefix("\ufeff")  # the mark that some spreadsheets write
            if line and not line.isspace():
                return line

    def peek(self) -> str | None:
        """The line that comes next, which stays the next; None at the end."""
        self._pending = next(self, None)
        return self._pending

    def error(self, reason: str, *, line: int | None = None) -> TraceError:
        """The error to raise about the line just read, or about another one."""
        return TraceError(self.path, self.number if line is None else line, reason)

    def tokens(self, name: str, value: object) -> int:
        """A number of tokens from 0 up, of a CSV cell or a JSON value.

        Raises:
            TraceError: It is not a whole number, negative, or beyond ``MAX_TOKENS``.
        """
        number = value
        if isinstance(value, str):
            text = value.strip()
            # Not int() alone, which takes "1_000" and other scripts' digits, too.
            number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
        if type(number) is not int or not 0 <= number <= MAX_TOKENS:
            raise self.error(
                f"{name} must be a whole number of tokens from 0 to {MAX_TOKENS:,}, "
                f"got {shown(value)}"
            )
        return number

    def seconds(self, name: str, value: object, *, per_second: float = 1.0) -> float:
        """A time in seconds, of a CSV cell or a JSON value in units of 1 / ``per_second`` s.

        Raises:
            TraceError: It is not a finite number.
        """
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                number = None
        # The limit comes first: beyond it an integer may not fit into a float.
        if type(number) in (int, float) and abs(cast(float, number)) <= _MAX_S * per_second:
            return cast(float, number) / per_second
        raise self.error(f"{name} must be a finite number, got {shown(value)}")

    def json_object(self, line: str) -> dict[str, Any]:
        """The JSON object in a line.

        Raises:
            TraceError: The line holds something else.
        """
        try:
            value = json.loads(line.rstrip())  # so that columns are counted in this line
        except json.JSONDecodeError as error:
            raise self.error(f"not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # endless digits, endless brackets
            raise self.error(f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise self.error(f"must be a JSON object, got {shown(value)}")
        return value


@dataclass(frozen=True)
class TraceReader:
    """How to read one format.

    Attributes:
        kind: ``csv`` with a header, or ``jsonl``: one JSON object per line.
        names: Columns of the header, or keys of the first object, by which it is recognised.
        read: The requests of a file, in any order. Raises ``lines.error`` about a line that it
            cannot read, and adds to ``lines.skipped`` the requests it leaves out.
    """

    kind: Literal["csv", "jsonl"]
    names: tuple[str, ...]
    read: Callable[[TraceLines], Iterator[TraceRequest]]


def read_trace(path: str | Path, *, format: str = "auto") -> Trace:  # noqa: A002
    """Read a trace from a file.

    Args:
        path: The file, plain or compressed with gzip.
        format: A name in ``READERS``, or ``auto`` to go by the first line.

    Raises:
        TraceError: The file cannot be read, or holds a line that cannot be.
        ConfigError: There is no such format.
    """
    from layby.simulate import recordings  # noqa: F401  # adds Layby's own format to READERS

    if format != "auto" and format not in READERS:
        raise ConfigError(
            f"there is no trace format {shown(format)}; there are auto, {', '.join(READERS)}"
        )
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(open(path, "rb"))
            file: IO[bytes] = raw
            # Looked at without moving on, so that a pipe can be read as well.
            if raw.peek(2)[:2] == _GZIP_MAGIC:
                file = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=raw)))
        except OSError as error:
            raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None
        lines = TraceLines(path, file)
        first = lines.peek()
        if first is None:
            raise TraceError(path, None, "the file is empty")
        reader = READERS[_detect(lines, first) if format == "auto" else format]
        try:
            requests = tuple(reader.read(lines))
        except ConfigError as error:  # what a request cannot be
            raise lines.error(str(error)) from None
    if not requests:
        failed = f": {counted(lines.skipped, 'request')} without an answer" if lines.skipped else ""
        raise TraceError(path, None, f"no request in it that could be run{failed}")
    return Trace(Path(path).name, requests, lines.skipped, lines.resizes, lines.pools)


def _detect(lines: TraceLines, first: str) -> str:
    """The format that the first line looks most like.

    It may lack some of the format's names: then the reader says which.
    """
    kind: str
    found: set[str]
    if first.lstrip().startswith("{"):
        kind, found = "jsonl", set(lines.json_object(first))
    else:
        kind, found = "csv", {cell.strip(' "\r\n\t') for cell in first.split(",")}

    def likeness(name: str) -> float:
        reader = READERS[name]
        if reader.kind != kind:
            return 0.0
        return len(found.intersection(reader.names)) / len(reader.names)

    best = max(READERS, key=likeness)
    if likeness(best) == 0.0:
        known = "; ".join(
            f"{name} ({'a CSV header' if reader.kind == 'csv' else 'JSON lines'} "
            f"with {', '.join(reader.names)})"
            for name, reader in READERS.items()
        )
        raise lines.error(f"neither of the known formats: {known}; got {shown(first.strip())}")
    return best


def _read_azure(lines: TraceLines) -> Iterator[TraceRequest]:
    start_ns: int | None = None
    for timestamp, prompt, output in _csv_columns(lines, _AZURE_COLUMNS):
        now_ns = _nanoseconds(lines, _AZURE_COLUMNS[0], timestamp)
        if start_ns is None:
            start_ns = now_ns  # a float of seconds since 1970 would lose the last digit
        yield from _request(
            lines,
            (now_ns - start_ns) / 1e9,
            lines.tokens(_AZURE_COLUMNS[1], prompt),
            lines.tokens(_AZURE_COLUMNS[2], output),
        )


def _read_burstgpt(lines: TraceLines) -> Iterator[TraceRequest]:
    for timestamp, prompt, output in _csv_columns(lines, _BURSTGPT_COLUMNS):
        yield from _request(
            lines,
            lines.seconds(_BURSTGPT_COLUMNS[0], timestamp),
            lines.tokens(_BURSTGPT_COLUMNS[1], prompt),
            lines.tokens(_BURSTGPT_COLUMNS[2], output),
        )


def _read_mooncake(lines: TraceLines) -> Iterator[TraceRequest]:
    for line in lines:
        row = lines.json_object(line)
        for name in _MOONCAKE_KEYS:
            if name not in row:
                raise lines.error(f"{name} is missing")
        ids = row.get("hash_ids", [])  # traces without shared prefixes leave it out
        if not isinstance(ids, list) or any(type(each) is not int for each in ids):
            raise lines.error(f"hash_ids must be a list of whole numbers, got {shown(ids)}")
        yield from _request(
            lines,
            lines.seconds("timestamp", row["timestamp"], per_second=1000),
            lines.tokens("input_length", row["input_length"]),
            lines.tokens("output_length", row["output_length"]),
            tuple(ids),
        )


def _request(
    lines: TraceLines,
    arrival_s: float,
    num_prompt: int,
    num_output: int,
    prefix: tuple[int, ...] = (),
) -> Iterator[TraceRequest]:
    """The request of a row; none if it failed."""
    if num_prompt == 0 or num_output == 0:
        lines.skipped += 1
        return
    block_tokens = _MOONCAKE_BLOCK_TOKENS if prefix else 0
    yield TraceRequest(
        arrival_s, num_prompt, num_output, prefix=prefix, prefix_block_tokens=block_tokens
    )


def _csv_columns(lines: TraceLines, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The cells of the named columns, row by row."""
    rows = csv.reader(lines, strict=True)
    row_start = lines.number  # a quote left open runs on: the line to name is where its row began
    try:
        header = [cell.strip() for cell in next(rows)]
        missing = [name for name in names if name not in header]
        if missing:
            raise lines.error(
                f"the header lacks {', '.join(missing)}; it has {shown(', '.join(header))}"
            )
        pick = itemgetter(*map(header.index, names))
        row_start = lines.number + 1
        for row in rows:
            if len(row) != len(header):
                raise lines.error(
                    f"{counted(len(row), 'column')} where the header has {len(header)}"
                )
            yield pick(row)
            row_start = lines.number + 1
    except csv.Error as error:
        raise lines.error(f"not CSV: {error}", line=row_start) from None


_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _nanoseconds(lines: TraceLines, name: str, text: str) -> int:
    """Nanoseconds since 1970 of a date and time, UTC unless it says otherwise.

    Not left to ``fromisoformat``, which keeps six decimals and takes many other forms.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is not None:
        date, time, fraction, zone = match.groups()
        try:
            since = datetime.fromisoformat(f"{date}T{time}{zone or 'Z'}") - _EPOCH
        except ValueError:  # the 31st of June
            pass
        else:
            seconds = since.days * 86_400 + since.seconds
            return seconds * 10**9 + int((fraction or "0").ljust(9, "0"))
    raise lines.error(
        f"{name} must be a date and time such as 2023-11-16 18:15:46.6805900, got {shown(text)}"
    )


def parse_time(what: str, text: str) -> float:
    """Seconds, as a person writes them.

    Raises:
        ConfigError: It is no time; says what was to be one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|)", text, re.ASCII)
    if match is None:
        raise ConfigError(
            f"{what} must be a time in seconds, or with a unit as in 500ms, 90s, 10m, 24h; "
            f"got {shown(text)}"
        )
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "": 1}[match[2]]


def _scale(tokens: int, factor: float) -> int:
    """A scaled length; kept finite, for its owner to refuse."""
    return max(1, round(min(tokens * factor, MAX_TOKENS + 1)))


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")

# By name, in the order in which help lists them.
READERS: dict[str, TraceReader] = {
    "azure": TraceReader("csv", _AZURE_COLUMNS, _read_azure),
    "burstgpt": TraceReader("csv", _BURSTGPT_COLUMNS, _read_burstgpt),
    "mooncake": TraceReader("jsonl", _MOONCAKE_KEYS, _read_mooncake),
}
