"""Synthetic traces: their statistics, their determinism, and the text that asks for them."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest

from layby.errors import ConfigError
from layby.simulate.arrivals import (
    Arrivals,
    constant,
    diurnal,
    drawn_from,
    gamma,
    independent,
    lognormal,
    merge,
    on_off,
    parse_arrivals,
    poisson,
    synthesise,
    uniform,
)
from layby.simulate.traces import Trace, TraceError, TraceRequest

LENGTHS = independent(constant(20), constant(30))
COMMON = "duration=100,prompt=20,output=30"


def times(arrivals: Arrivals, chunks: int = 50) -> np.ndarray:
    """About 200,000 arrival times."""
    result = np.concatenate(list(islice(arrivals.times(np.random.default_rng(1)), chunks)))
    assert result[0] >= 0
    assert (np.diff(result) >= 0).all()
    return result


def rate_of(at: np.ndarray) -> float:
    return len(at) / at[-1]


# --- Rhythms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (poisson(5), 1),
        (gamma(5, cv=1), 1),
        (gamma(5, cv=3), 3),
        (gamma(5, cv=0.3), 0.3),
        (gamma(5, cv=0), 0),
    ],
)
def test_renewals_have_the_rate_and_the_burstiness_asked_for(arrivals, cv):
    at = times(arrivals)
    gaps = np.diff(at)
    assert rate_of(at) == pytest.approx(5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)
    assert arrivals.mean_rate == 5


@pytest.mark.parametrize("rate_off", [0, 2.0])
def test_on_off(rate_off):
    arrivals = on_off(20, rate_off, on_s=10, off_s=30)
    at = times(arrivals)
    assert arrivals.mean_rate == (200 + 30 * rate_off) / 40
    assert rate_of(at) == pytest.approx(arrivals.mean_rate, rel=0.05)
    phase = at % 40
    cycles = at[-1] / 40
    assert (phase < 10).sum() / cycles / 10 == pytest.approx(20, rel=0.05)
    assert (phase > 10).sum() / cycles / 30 == pytest.approx(rate_off, rel=0.05)
    # Within a burst they come evenly.
    assert np.histogram(phase, 5, (0, 10))[0] / cycles / 2 == pytest.approx([20] * 5, rel=0.05)


def test_diurnal():
    arrivals = diurnal(5, period_s=100, amplitude=0.8)
    at = times(arrivals, 100)
    assert rate_of(at) == pytest.approx(5, rel=0.05)
    cycles = at[-1] / 100
    per_second = np.histogram(at % 100, 10, (0, 100))[0] / cycles / 10
    # The mean of the sine over each tenth of a period.
    edges = np.linspace(0, 2 * math.pi, 11)
    sines = -np.diff(np.cos(edges)) / np.diff(edges)
    assert per_second == pytest.approx(5 * (1 + 0.8 * sines), rel=0.05)


# --- Lengths ------------------------------------------------------------------------------------


def test_lengths_have_the_mean_and_the_spread_asked_for():
    rng = np.random.default_rng(1)
    assert set(constant(7)(rng, 100).tolist()) == {7}
    even = uniform(3, 6)(rng, 100_000)
    assert np.bincount(even)[3:].tolist() == pytest.approx([25_000] * 4, rel=0.05)
    assert even.min() == 3
    long = lognormal(200, sigma=0.8)(rng, 200_000)
    assert long.mean() == pytest.approx(200, rel=0.02)
    assert np.log(long).std() == pytest.approx(0.8, rel=0.02)
    tailed = lognormal(200, p99=2000)(rng, 400_000)
    assert tailed.mean() == pytest.approx(200, rel=0.05)
    assert np.percentile(tailed, 99) == pytest.approx(2000, rel=0.05)
    assert set(lognormal(200, p99=200)(rng, 100).tolist()) == {200}
    assert lognormal(1, sigma=3)(rng, 1000).min() == 1


def test_lengths_of_another_trace_stay_in_pairs():
    other = Trace("t", [TraceRequest(0.0, 10, 100), TraceRequest(1.0, 20, 200)])
    trace = synthesise(poisson(5), num_requests=1000, lengths=drawn_from(other))
    pairs = [(r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests]
    assert set(pairs) == {(10, 100), (20, 200)}
    assert 400 < pairs.count((10, 100)) < 600
    with pytest.raises(ConfigError, match="empty"):
        drawn_from(Trace("none", ()))


def test_prompts_and_outputs_are_independent():
    lengths = independent(uniform(1, 1000), uniform(1, 1000))
    prompts, outputs = lengths(np.random.default_rng(1), 10_000)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.05


# --- Traces -------------------------------------------------------------------------------------


def test_duration_and_number():
    trace = synthesise(poisson(50), duration_s=100, lengths=LENGTHS)
    assert len(trace) == pytest.approx(5000, rel=0.05)
    assert 99 < trace.duration_s < 100
    assert trace.requests[0] == TraceRequest(0.0, 20, 30)
    assert len(synthesise(poisson(50), num_requests=4097, lengths=LENGTHS)) == 4097


def test_classes_by_shares():
    trace = synthesise(
        poisson(5), num_requests=20_000, lengths=LENGTHS, priorities={5: 3, 0: 1, -1: 0}
    )
    classes = [r.priority for r in trace.requests]
    assert classes.count(5) == pytest.approx(15_000, rel=0.05)
    assert classes.count(0) == 20_000 - classes.count(5)


def test_the_seed_decides_everything():
    lengths = independent(uniform(1, 1000), lognormal(200, sigma=1))

    def make(seed: int) -> Trace:
        return synthesise(
            gamma(5, 2), duration_s=50, lengths=lengths, priorities={0: 1, 1: 1}, seed=seed
        )

    assert make(3) == make(3)
    one, other = make(3), make(4)
    assert {r.arrival_s for r in one.requests} & {r.arrival_s for r in other.requests} == {0.0}


@pytest.mark.parametrize(
    "arrivals", [poisson(50), gamma(50, 3), on_off(100, 1, 3, 3), diurnal(50, 20, 1)]
)
def test_a_longer_trace_begins_with_the_shorter_one(arrivals):
    lengths = independent(uniform(1, 1000), lognormal(200, sigma=1))
    shares = {0: 1.0, 1: 2.0}
    short = synthesise(arrivals, duration_s=30, lengths=lengths, priorities=shares)
    long = synthesise(arrivals, duration_s=300, lengths=lengths, priorities=shares)
    counted = synthesise(arrivals, num_requests=len(short), lengths=lengths, priorities=shares)
    assert long.requests[: len(short)] == short.requests == counted.requests


def test_other_lengths_leave_the_arrivals_as_they_were():
    one = synthesise(poisson(5), num_requests=100, lengths=LENGTHS)
    two = synthesise(poisson(5), num_requests=100, lengths=independent(uniform(1, 9), constant(1)))
    assert [r.arrival_s for r in one.requests] == [r.arrival_s for r in two.requests]


def test_merge():
    first = Trace("a", [TraceRequest(0.0, 9, 1, prefix=(7, 8), prefix_block_tokens=5)], skipped=1)
    second = Trace(
        "b",
        [
            TraceRequest(0.0, 9, 2, prefix=(7, 9), prefix_block_tokens=5, request_id="x"),
            TraceRequest(2.0, 9, 3, prefix=(7,), prefix_block_tokens=5),
        ],
        skipped=2,
    )
    third = Trace("c", [TraceRequest(0.0, 1, 4, request_id="x"), TraceRequest(1.0, 1, 5)])
    merged = merge([first, second, third])
    assert merged.name == "a + b + c"
    assert merged.skipped == 3
    assert [r.num_output_tokens for r in merged.requests] == [1, 2, 4, 5, 3]
    # Equal within a trace stays equal, equal across traces does not.
    a, b, _, _, b_later = (r.prefix for r in merged.requests)
    assert b_later == b[:1]
    assert len(set(a + b)) == 4
    assert [r.request_id for r in merged.requests] == [None, "x", "x#2", None, None]
    assert merge([first]) == first
    assert merge([first], name="z").name == "z"
    with pytest.raises(ConfigError, match="no traces"):
        merge([])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: poisson(0), "rate must be a positive"),
        (lambda: poisson(math.nan), "rate must be a positive"),
        (lambda: gamma(math.inf, 1), "rate must be a positive"),
        (lambda: gamma(1, -1), "cv must be from 0 to 100"),
        (lambda: on_off(1, -1, 1, 1), "rate_off"),
        (lambda: on_off(1, 0, 0, 1), "on_s"),
        (lambda: diurnal(1, 10, 1.5), "amplitude must be from 0 to 1"),
        (lambda: diurnal(1, -10, 1), "period_s"),
        (lambda: constant(0), "tokens must be from 1"),
        (lambda: uniform(5, 4), "5 to 4"),
        (lambda: uniform(0, 4), "low must be"),
        (lambda: lognormal(200), "either sigma or p99"),
        (lambda: lognormal(200, sigma=1, p99=300), "either sigma or p99"),
        (lambda: lognormal(200, sigma=-1), "sigma"),
        (lambda: lognormal(200, p99=100), r"from its mean \(200\).*got 100"),
        (lambda: lognormal(200, p99=4000), r"14.9 times its mean \(2980\), got 4000"),
        (lambda: lognormal(0, sigma=1), "mean"),
        (lambda: synthesise(poisson(1), lengths=LENGTHS), "either a duration or a number"),
        (lambda: synthesise(poisson(1), lengths=LENGTHS, duration_s=-1), "duration"),
        (lambda: synthesise(poisson(1), lengths=LENGTHS, num_requests=0), "requests"),
        (lambda: synthesise(poisson(1), lengths=LENGTHS, num_requests=1, seed=-1), "seed"),
        (lambda: synthesise(poisson(1e-9), lengths=LENGTHS, duration_s=1), "no request came"),
        (lambda: synthesise(poisson(1e-320), lengths=LENGTHS, num_requests=3), "never come"),
        (lambda: synthesise(poisson(1e9), lengths=LENGTHS, duration_s=10), r"1e\+10 requests"),
        (
            lambda: synthesise(poisson(1), lengths=LENGTHS, num_requests=1, priorities={1: -1}),
            "share of class 1",
        ),
        (
            lambda: synthesise(poisson(1), lengths=LENGTHS, num_requests=1, priorities={1: 0}),
            "at least one class",
        ),
    ],
)
def test_what_cannot_be_made(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


# --- The text form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("poisson:rate=5", poisson(5)),
        ("gamma:rate=5,cv=3", gamma(5, 3)),
        ("on-off:rate=20,idle-rate=1,on=10,off=1.5m", on_off(20, 1, 10, 90)),
        ("on-off:rate=20,on=500ms,off=2s", on_off(20, 0, 0.5, 2)),
        ("diurnal:rate=2,period=1h,amplitude=0.5", diurnal(2, 3600, 0.5)),
    ],
)
def test_rhythms_by_text(text, arrivals):
    trace = parse_arrivals(f"{text},{COMMON}", seed=7)
    assert trace.requests == synthesise(arrivals, duration_s=100, lengths=LENGTHS, seed=7).requests
    assert trace.name == f"{text},{COMMON}"


@pytest.mark.parametrize(
    ("text", "draw"),
    [
        ("200", constant(200)),
        ("50-400", uniform(50, 400)),
        ("lognormal(200,0.8)", lognormal(200, sigma=0.8)),
        ("lognormal( 200, sigma=0.8 )", lognormal(200, sigma=0.8)),
        ("lognormal(200,p99=2000)", lognormal(200, p99=2000)),
    ],
)
def test_lengths_by_text(text, draw):
    trace = parse_arrivals(f"poisson:rate=5,requests=50,prompt={text},output={text}")
    expected = synthesise(poisson(5), num_requests=50, lengths=independent(draw, draw))
    assert trace.requests == expected.requests


def test_classes_seed_and_spaces_by_text():
    trace = parse_arrivals(" poisson: rate=5, requests=50 ,prompt=20,output=30,priority=-5,seed=9")
    expected = synthesise(poisson(5), num_requests=50, lengths=LENGTHS, priorities={-5: 1}, seed=9)
    assert trace.requests == expected.requests
    trace = parse_arrivals("poisson:rate=5,requests=500,prompt=20,output=30,priority=0:1/5:0.25")
    expected = synthesise(poisson(5), num_requests=500, lengths=LENGTHS, priorities={0: 4, 5: 1})
    assert trace.requests == expected.requests


def test_lengths_like_those_of_a_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    trace = parse_arrivals(f"poisson:rate=5,requests=3,like={path}")
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests} == {(374, 44)}
    with pytest.raises(TraceError, match=r"none\.csv"):
        parse_arrivals(f"poisson:rate=5,requests=3,like={tmp_path / 'none.csv'}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rhythm ''; there are poisson, gamma, on-off, diurnal"),
        ("poison:rate=5", "no rhythm 'poison' (did you mean poisson?)"),
        ("poisson", "after poisson comes a colon and rate"),
        ("poisson:", "expected key=value, got ''"),
        ("poisson:rate", "expected key=value, got 'rate'"),
        ("poisson:rate=", "expected key=value, got 'rate='"),
        (f"poisson:raet=5,{COMMON}", "no key 'raet' (did you mean rate?); poisson takes rate,"),
        (f"poisson:rate=5,cv=3,{COMMON}", "no key 'cv'"),
        (f"poisson:rate=5,rate=6,{COMMON}", "rate is given twice"),
        (f"poisson:{COMMON}", "rate is missing"),
        (f"gamma:rate=5,{COMMON}", "cv is missing"),
        (f"on-off:rate=5,on=5,{COMMON}", "off is missing"),
        (f"poisson:rate=fast,{COMMON}", "rate must be a number, got 'fast'"),
        (f"poisson:rate=-5,{COMMON}", "rate must be a positive finite number, got -5.0"),
        (f"poisson:rate=nan,{COMMON}", "rate must be a positive finite number"),
        ("poisson:rate=5,prompt=1,output=1", "either duration or requests"),
        (f"poisson:rate=5,requests=3,{COMMON}", "either duration or requests"),
        ("poisson:rate=5,requests=many,prompt=1,output=1", "requests must be a whole number"),
        ("poisson:rate=5,duration=5d,prompt=1,output=1", "duration must be a time in seconds"),
        ("poisson:rate=5,duration=0,prompt=1,output=1", "duration must be a positive"),
        ("poisson:rate=5,duration=9,output=1", "prompt is missing"),
        ("poisson:rate=5,duration=9,prompt=1", "output is missing"),
        ("poisson:rate=5,duration=9,prompt=0,output=1", "prompt=0: tokens must be from 1"),
        ("poisson:rate=5,duration=9,prompt=9-5,output=1", "prompt=9-5: a range"),
        ("poisson:rate=5,duration=9,prompt=normal(5,1),output=1", "lognormal(MEAN,SIGMA)"),
        ("poisson:rate=5,duration=9,prompt=lognormal(5),output=1", "lognormal(MEAN,SIGMA)"),
        ("poisson:rate=5,duration=9,prompt=lognormal(5,1.2.3),output=1", "lognormal(MEAN,SIGMA)"),
        ("poisson:rate=5,duration=9,prompt=lognormal(5,p99=900),output=1", "14.9 times"),
        ("poisson:rate=5,duration=9,prompt=5,like=x", "like gives all lengths"),
        (f"poisson:rate=5,{COMMON},priority=high", "priority must be a whole number, got 'high'"),
        (f"poisson:rate=5,{COMMON},priority=1/2", "0:1/5:4"),
        (f"poisson:rate=5,{COMMON},priority=1:2/1:3", "class 1 has two shares"),
        (f"poisson:rate=5,{COMMON},priority=1:x", "share of a class must be a number"),
        (f"poisson:rate=5,{COMMON},priority=1:0", "at least one class"),
        (f"poisson:rate=5,{COMMON},seed=x", "seed must be a whole number"),
        (f"poisson:rate=5,{COMMON},seed=-1", "seed must be at least 0"),
    ],
)
def test_texts_that_say_nothing(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_arrivals(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)  # several may be on one command line
