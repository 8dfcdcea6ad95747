"""Synthetic traces: arrivals of a chosen rhythm, lengths of a chosen distribution.

In code:

    trace = synthesise(
        gamma(rate=5, cv=3), duration_s=600, lengths=independent(constant(200), uniform(50, 400))
    )

On a command line, one text of the form ``RHYTHM:key=value,key=value,…``:

    poisson:rate=5,duration=10m,prompt=200,output=300
    gamma:rate=5,cv=3,requests=1000,prompt=50-400,output=lognormal(200,0.8)
    on-off:rate=20,idle-rate=1,on=10,off=20,duration=600,prompt=500,output=100,priority=5
    diurnal:rate=2,period=24h,amplitude=0.8,duration=48h,like=trace.csv,priority=0:1/5:4

| rhythm    | keys                                                                              |
|-----------|-----------------------------------------------------------------------------------|
| `poisson` | `rate`: requests per second, each on its own                                      |
| `gamma`   | `rate`; `cv`: deviation of the gaps over their mean; 0 even, 1 Poisson, >1 bursty |
| `on-off`  | `rate` for `on`, `idle-rate` (or 0) for `off`, and so on in turn                  |
| `diurnal` | mean `rate`, rising and falling by `amplitude` (0 to 1) of it every `period`      |

| key        | meaning                                                                          |
|------------|----------------------------------------------------------------------------------|
| `duration` | how long requests come; or                                                       |
| `requests` | how many come                                                                    |
| `prompt`   | prompt tokens: see below                                                         |
| `output`   | output tokens; or, in place of both,                                             |
| `like`     | a trace file from which requests' lengths are drawn, prompt and answer together  |
| `priority` | the class, 0 if left out; or classes with their shares: `0:1/5:4`                |
| `seed`     | the seed, if not the caller's                                                    |

Times are in seconds, or with a unit: `500ms`, `90s`, `10m`, `24h`. Lengths are a number (`200`), a
range drawn from evenly (`50-400`), or `lognormal(MEAN,SIGMA)`, where SIGMA is the deviation of the
logarithm, or `lognormal(MEAN,p99=LENGTH)`.

Everything random comes from the seed. Arrivals, lengths and classes draw from streams of their own:
other lengths leave the arrivals as they were, and a longer trace begins with the shorter one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from layby.errors import ConfigError, shown
from layby.simulate.traces import MAX_TOKENS, Trace, TraceRequest, parse_time, read_trace

MAX_REQUESTS = 10_000_000  # of one synthetic trace; each takes about 0.2 KB

_CHUNK = 4096  # arrivals drawn at a time
_Z99 = 2.3263478740408408  # the normal distribution's 99th percentile

Draw = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Draws so many lengths, in tokens."""

DrawPairs = Callable[[np.random.Generator, int], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Draws the prompt and output lengths of so many requests, in tokens."""


# --- Rhythms ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A rhythm in which requests come.

    Attributes:
        name: What it is called on the command line.
        mean_rate: Requests per second in the long run.
        times: Draws arrival times without end, in seconds, in chunks: never falling, the first
            from 0 on.
    """

    name: str
    mean_rate: float
    times: Callable[[np.random.Generator], Iterator[NDArray[np.float64]]]


def poisson(rate: float) -> Arrivals:
    """Requests that know nothing of each other, ``rate`` per second.

    Raises:
        ConfigError: The rate is not a positive number.
    """
    _positive(rate=rate)
    return Arrivals("poisson", rate, lambda rng: _poisson_times(rng, rate))


def gamma(rate: float, cv: float) -> Arrivals:
    """Gaps of a gamma distribution: with the same mean, as even or as bursty as ``cv`` says.

    Args:
        rate: Requests per second.
        cv: Standard deviation of the gaps divided by their mean: 0 is a metronome, 1 is Poisson.

    Raises:
        ConfigError: The rate is not a positive number, or ``cv`` is not a number from 0 to 100.
    """
    _positive(rate=rate)
    _between(0, 100, cv=cv)
    if cv == 0:
        return Arrivals("gamma", rate, lambda _: _sums(lambda count: np.full(count, 1 / rate)))
    shape, scale = cv**-2, cv**2 / rate
    return Arrivals(
        "gamma", rate, lambda rng: _sums(lambda count: rng.gamma(shape, scale, size=count))
    )


def on_off(rate_on: float, rate_off: float, on_s: float, off_s: float) -> Arrivals:
    """Bursts: Poisson at ``rate_on`` for ``on_s`` seconds, at ``rate_off`` for ``off_s``, in turn.

    Raises:
        ConfigError: A number is not positive; ``rate_off`` may be 0.
    """
    _positive(rate_on=rate_on, on_s=on_s, off_s=off_s)
    if rate_off != 0:
        _positive(rate_off=rate_off)
    cycle_s = on_s + off_s
    mass_on = rate_on * on_s
    mass = mass_on + rate_off * off_s  # requests expected in one cycle

    def times(rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
        # Poisson arrivals at rate 1, on a clock that counts expected requests instead of seconds.
        for expected in _poisson_times(rng, 1.0):
            cycles, rest = np.divmod(expected, mass)
            after_on = np.maximum(rest - mass_on, 0.0) / rate_off if rate_off else 0.0
            yield cycles * cycle_s + np.minimum(rest, mass_on) / rate_on + after_on

    return Arrivals("on-off", mass / cycle_s, times)


def diurnal(mean_rate: float, period_s: float, amplitude: float) -> Arrivals:
    """A rate that rises and falls as a sine, beginning at its mean and rising.

    Args:
        mean_rate: Requests per second over a whole period.
        period_s: From crest to crest.
        amplitude: Height of a crest over the mean, as a share of the mean, from 0 to 1.

    Raises:
        ConfigError: A number is out of range.
    """
    _positive(mean_rate=mean_rate, period_s=period_s)
    _between(0, 1, amplitude=amplitude)

    def times(rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
        # Thinning: candidates at the crest's rate, of which each is kept with the odds of its hour.
        for candidates in _poisson_times(rng, mean_rate * (1 + amplitude)):
            odds = 1 + amplitude * np.sin(candidates * (2 * math.pi / period_s))
            yield candidates[rng.random(len(candidates)) * (1 + amplitude) < odds]

    return Arrivals("diurnal", mean_rate, times)


def _poisson_times(rng: np.random.Generator, rate: float) -> Iterator[NDArray[np.float64]]:
    return _sums(lambda count: rng.exponential(1 / rate, size=count))


def _sums(gaps: Callable[[int], NDArray[np.float64]]) -> Iterator[NDArray[np.float64]]:
    """Arrival times out of the gaps before them."""
    now = 0.0
    while True:
        times = now + np.cumsum(gaps(_CHUNK))
        now = float(times[-1])
        yield times


# --- Lengths ------------------------------------------------------------------------------------


def constant(tokens: int) -> Draw:
    """Always the same length.

    Raises:
        ConfigError: The length is not from 1 to ``MAX_TOKENS``.
    """
    _between(1, MAX_TOKENS, tokens=tokens)
    return lambda _, count: np.full(count, tokens, dtype=np.int64)


def uniform(low: int, high: int) -> Draw:
    """Every length from ``low`` to ``high``, both included, equally likely.

    Raises:
        ConfigError: A length is not from 1 to ``MAX_TOKENS``, or they are the wrong way round.
    """
    _between(1, MAX_TOKENS, low=low, high=high)
    if low > high:
        raise ConfigError(f"a range of lengths must rise, got {low} to {high}")
    return lambda rng, count: rng.integers(low, high, size=count, endpoint=True)


def lognormal(mean: float, *, sigma: float | None = None, p99: float | None = None) -> Draw:
    """Many short lengths and few long ones, rounded, at least 1 token.

    Args:
        mean: Their mean, before rounding.
        sigma: Standard deviation of their logarithm, from 0 to 10; or
        p99: the length that one in a hundred exceeds, from the mean to 14.9 times the mean (no
            lognormal has a heavier 99th percentile).

    Raises:
        ConfigError: Not exactly one of ``sigma`` and ``p99`` is given, or a number is out of range.
    """
    _between(1, MAX_TOKENS, mean=mean)
    if (sigma is None) == (p99 is None):
        raise ConfigError("a lognormal length takes either sigma or p99")
    if p99 is not None:
        # p99 / mean = exp(z sigma - sigma² / 2), solved for the smaller sigma.
        heaviest = math.floor(10 * math.exp(_Z99**2 / 2)) / 10
        if not mean <= p99 <= heaviest * mean:
            raise ConfigError(
                f"p99 of a lognormal length must be from its mean ({mean:g}) to {heaviest} times "
                f"its mean ({heaviest * mean:g}), got {p99:g}"
            )
        sigma = _Z99 - math.sqrt(_Z99**2 - 2 * math.log(p99 / mean))
    assert sigma is not None
    _between(0, 10, sigma=sigma)
    mu = math.log(mean) - sigma**2 / 2

    def draw(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        lengths = np.rint(rng.lognormal(mu, sigma, size=count))
        return np.clip(lengths, 1, MAX_TOKENS).astype(np.int64)

    return draw


def independent(prompt: Draw, output: Draw) -> DrawPairs:
    """Prompt and output lengths that know nothing of each other."""

    def draw(rng: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        prompt_rng, output_rng = rng.spawn(2)
        return prompt(prompt_rng, count), output(output_rng, count)

    return draw


def drawn_from(trace: Trace) -> DrawPairs:
    """The lengths of another trace's requests, at random and with repetition.

    A prompt stays with its answer; prefixes and classes are not taken over.

    Raises:
        ConfigError: The trace is empty.
    """
    if not trace.requests:
        raise ConfigError(f"no lengths can be drawn from the trace {trace.name}: it is empty")
    prompts = np.array([request.num_prompt_tokens for request in trace.requests], dtype=np.int64)
    outputs = np.array([request.num_output_tokens for request in trace.requests], dtype=np.int64)

    def draw(rng: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        picked = rng.integers(len(prompts), size=count)
        return prompts[picked], outputs[picked]

    return draw


# --- Traces -------------------------------------------------------------------------------------


def synthesise(
    arrivals: Arrivals,
    *,
    lengths: DrawPairs,
    duration_s: float | None = None,
    num_requests: int | None = None,
    priorities: Mapping[int, float] | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Trace:
    """Make a trace.

    As in every trace the first request comes at 0; the rhythm has begun a little earlier.

    Args:
        arrivals: When requests come.
        lengths: How long they are.
        duration_s: For how long they come; or
        num_requests: how many come.
        priorities: Classes with their shares, in any unit; None: all of class 0.
        seed: Two traces are equal if everything is, this included.
        name: What a report calls it; None: the rhythm's name.

    Raises:
        ConfigError: Not exactly one of duration and number is given, a number is out of range, or
            no request comes in the time given.
    """
    if (duration_s is None) == (num_requests is None):
        raise ConfigError(
            f"{arrivals.name} arrivals take either a duration or a number of requests"
        )
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    arrival_rng, length_rng, class_rng = np.random.default_rng(seed).spawn(3)
    if duration_s is not None:
        _positive(duration=duration_s)
        expected = arrivals.mean_rate * duration_s
        if not expected <= MAX_REQUESTS:  # nor is it when the numbers overflow to NaN
            raise ConfigError(
                f"{arrivals.mean_rate:g} requests per second for {duration_s:g} s are about "
                f"{expected:.3g} requests; a synthetic trace has at most {MAX_REQUESTS:,}"
            )
        times = _until(arrivals.times(arrival_rng), duration_s)
    else:
        assert num_requests is not None
        _between(1, MAX_REQUESTS, requests=num_requests)
        times = _first(arrivals.times(arrival_rng), num_requests)
    if len(times) == 0:
        raise ConfigError(
            f"no request came: {arrivals.mean_rate:g} per second for {duration_s:g} s are too few"
        )
    if not math.isfinite(times[-1]):
        raise ConfigError(f"requests never come at {arrivals.mean_rate:g} per second")
    prompts, outputs = lengths(length_rng, len(times))
    requests = map(
        TraceRequest,
        (times - times[0]).tolist(),
        prompts.tolist(),
        outputs.tolist(),
        _classes(class_rng, priorities or {0: 1.0}, len(times)),
    )
    return Trace(name or arrivals.name, tuple(requests))


def merge(traces: Sequence[Trace], *, name: str | None = None) -> Trace:
    """Several traces as one, all of them beginning at the same time.

    Requests that come at the same time keep the order of the traces. Requests of different traces
    share no prefix, whatever their ids; a request's name that comes again gets a number.

    Raises:
        ConfigError: There is nothing to merge.
    """
    if not traces:
        raise ConfigError("there are no traces to merge")
    if len(traces) == 1:
        return traces[0] if name is None else replace(traces[0], name=name)
    new_ids: dict[tuple[int, int], int] = {}
    names_seen: dict[str, int] = {}
    requests = []
    for index, trace in enumerate(traces):
        for request in trace.requests:
            if request.prefix:
                prefix = tuple(
                    new_ids.setdefault((index, each), len(new_ids)) for each in request.prefix
                )
                request = replace(request, prefix=prefix)
            if request.request_id is not None:
                seen = names_seen.get(request.request_id, 0)
                names_seen[request.request_id] = seen + 1
                if seen:
                    request = replace(request, request_id=f"{request.request_id}#{seen + 1}")
            requests.append(request)
    return Trace(
        name or " + ".join(trace.name for trace in traces),
        requests,
        sum(trace.skipped for trace in traces),
    )


def _until(chunks: Iterator[NDArray[np.float64]], end_s: float) -> NDArray[np.float64]:
    """The arrival times before ``end_s``."""
    kept = []
    for chunk in chunks:
        kept.append(chunk)
        if len(chunk) and chunk[-1] >= end_s:
            break
    times = np.concatenate(kept)
    return times[: np.searchsorted(times, end_s)]


def _first(chunks: Iterator[NDArray[np.float64]], number: int) -> NDArray[np.float64]:
    """The first so many arrival times."""
    kept: list[NDArray[np.float64]] = []
    while sum(map(len, kept)) < number:
        kept.append(next(chunks))
    return np.concatenate(kept)[:number]


def _classes(rng: np.random.Generator, shares: Mapping[int, float], count: int) -> list[int]:
    for priority, share in shares.items():
        if not 0 <= share < math.inf:
            raise ConfigError(f"the share of class {priority} must be from 0 up, got {share!r}")
    total = sum(shares.values())
    if not 0 < total < math.inf:
        raise ConfigError("at least one class must have a share above 0, and all a finite sum")
    priorities = [priority for priority, share in shares.items() if share > 0]
    bounds = np.cumsum([shares[priority] / total for priority in priorities])
    # Compared with all bounds but the last, which may be a hair below 1.
    picked = np.searchsorted(bounds[:-1], rng.random(count), side="right")
    return [priorities[each] for each in picked.tolist()]


# --- The text form ------------------------------------------------------------------------------


def parse_arrivals(text: str, *, seed: int = 0) -> Trace:
    """Make the trace that a text describes; the module's docstring has the grammar.

    Args:
        text: Such as ``poisson:rate=5,duration=10m,prompt=200,output=300``.
        seed: Used where the text names none. Give each of several texts its own, or requests of
            equal rhythms come at equal times.

    Raises:
        ConfigError: The text does not follow the grammar, or a number is out of range.
        TraceError: The file of ``like`` cannot be read.
    """
    try:
        return _parse(text, seed)
    except ConfigError as error:
        raise ConfigError(f"arrivals {text!r}: {error}") from None


def _parse(text: str, seed: int) -> Trace:
    rhythm, colon, rest = text.partition(":")
    rhythm = rhythm.strip()
    if rhythm not in _RHYTHMS:
        raise ConfigError(
            f"there is no rhythm {shown(rhythm)}{_meant(rhythm, _RHYTHMS)}; there are "
            f"{', '.join(_RHYTHMS)}, as in poisson:rate=5,duration=10m,prompt=200,output=300"
        )
    keys, make = _RHYTHMS[rhythm]
    if not colon:
        raise ConfigError(f"after {rhythm} comes a colon and {', '.join(keys)} and so on")
    values = _values(rest, rhythm, (*keys, *_COMMON_KEYS))
    arrivals = make(values)
    if "like" in values:
        for key in ("prompt", "output"):
            if key in values:
                raise ConfigError(f"like gives all lengths, so that {key} cannot be given as well")
        lengths = drawn_from(read_trace(values["like"]))
    else:
        lengths = independent(*(_parse_lengths(values, key) for key in ("prompt", "output")))
    if ("duration" in values) == ("requests" in values):
        raise ConfigError("give either duration or requests")
    return synthesise(
        arrivals,
        lengths=lengths,
        duration_s=_parse_time(values, "duration") if "duration" in values else None,
        num_requests=_parse_integer("requests", values["requests"])
        if "requests" in values
        else None,
        priorities=_parse_priorities(values.get("priority", "0")),
        seed=_parse_integer("seed", values["seed"]) if "seed" in values else seed,
        name=text,
    )


def _values(text: str, rhythm: str, keys: Sequence[str]) -> dict[str, str]:
    """``key=value,key=value`` as a dictionary; a comma in brackets separates nothing."""
    values: dict[str, str] = {}
    for part in re.split(r",(?![^()]*\))", text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"expected key=value, got {shown(part.strip())}")
        if key not in keys:
            raise ConfigError(
                f"there is no key {shown(key)}{_meant(key, keys)}; {rhythm} takes {', '.join(keys)}"
            )
        if key in values:
            raise ConfigError(f"{key} is given twice")
        values[key] = value
    return values


def _required(values: Mapping[str, str], key: str) -> str:
    if key not in values:
        raise ConfigError(f"{key} is missing")
    return values[key]


def _parse_number(values: Mapping[str, str], key: str) -> float:
    text = _required(values, key)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key} must be a number, got {shown(text)}") from None


def _parse_integer(what: str, text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text.strip(), re.ASCII):
        raise ConfigError(f"{what} must be a whole number, got {shown(text)}")
    return int(text)


def _parse_time(values: Mapping[str, str], key: str) -> float:
    """Seconds."""
    return parse_time(key, _required(values, key))


def _parse_lengths(values: Mapping[str, str], key: str) -> Draw:
    text = _required(values, key)
    try:
        if match := re.fullmatch(r"(\d{1,18})", text, re.ASCII):
            return constant(int(text))
        if match := re.fullmatch(r"(\d{1,18})\s*-\s*(\d{1,18})", text, re.ASCII):
            return uniform(int(match[1]), int(match[2]))
        if match := re.fullmatch(
            r"lognormal\(\s*([\d.]+)\s*,\s*(?:(sigma|p99)\s*=\s*)?([\d.]+)\s*\)", text, re.ASCII
        ):
            mean, which, number = float(match[1]), match[2] or "sigma", float(match[3])
            return lognormal(mean, **{which: number})
    except ConfigError as error:
        raise ConfigError(f"{key}={text}: {error}") from None
    except ValueError:  # a number with two points
        pass
    raise ConfigError(
        f"{key} must be a number of tokens (200), a range (50-400), lognormal(MEAN,SIGMA) or "
        f"lognormal(MEAN,p99=LENGTH), got {shown(text)}"
    )


def _parse_priorities(text: str) -> dict[int, float]:
    """``5``, or ``0:1/5:4``."""
    if ":" not in text and "/" not in text:
        return {_parse_integer("priority", text): 1.0}
    shares: dict[int, float] = {}
    for part in text.split("/"):
        priority, colon, share = part.partition(":")
        if not colon:
            raise ConfigError(
                f"priority must be a class or shares as in 0:1/5:4, got {shown(text)}"
            )
        number = _parse_integer("priority", priority)
        if number in shares:
            raise ConfigError(f"class {number} has two shares in priority={text}")
        shares[number] = _parse_number({"the share of a class": share}, "the share of a class")
    return shares


def _meant(word: str, words: Mapping[str, object] | Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ConfigError(f"{name} must be a positive finite number, got {number!r}")


def _between(low: float, high: float, /, **numbers: float) -> None:
    for name, number in numbers.items():
        if not low <= number <= high:
            raise ConfigError(f"{name} must be from {low:,} to {high:,}, got {number!r}")


_COMMON_KEYS = ("duration", "requests", "prompt", "output", "like", "priority", "seed")

# The keys of each rhythm, and how to make it of their values.
_RHYTHMS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, str]], Arrivals]]] = {
    "poisson": (("rate",), lambda values: poisson(_parse_number(values, "rate"))),
    "gamma": (
        ("rate", "cv"),
        lambda values: gamma(_parse_number(values, "rate"), _parse_number(values, "cv")),
    ),
    "on-off": (
        ("rate", "idle-rate", "on", "off"),
        lambda values: on_off(
            _parse_number(values, "rate"),
            _parse_number({"idle-rate": "0", **values}, "idle-rate"),
            _parse_time(values, "on"),
            _parse_time(values, "off"),
        ),
    ),
    "diurnal": (
        ("rate", "period", "amplitude"),
        lambda values: diurnal(
            _parse_number(values, "rate"),
            _parse_time(values, "period"),
            _parse_number(values, "amplitude"),
        ),
    ),
}
