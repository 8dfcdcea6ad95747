"""Sampling parameters are checked once, and refusals name the parameter."""

from __future__ import annotations

import pytest

from layby import InvalidRequestError, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", 1.0),
        ("n", True),
        ("n", 10**4000),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 0.009),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**64),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", None),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {"x" * 10_000: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", (None,)),
        ("stop", ("x" * 1025,)),
        ("stop", ["x"] * 10_000),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", (10**5000,) * 2000),
        ("stop_token_ids", ("x" * 10_000,)),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("seed", [0] * 10_000),
        ("top_p", "x" * 10_000),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(param: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{param: value})  # type: ignore[arg-type]
    assert refusal.value.param == param
    assert param in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("param", ["stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused_with_both_numbers(param: str) -> None:
    value: object = {500: 1.0} if param == "logit_bias" else (500,)
    params = SamplingParams(**{param: value})  # type: ignore[arg-type]
    params.check_vocabulary(501)
    with pytest.raises(InvalidRequestError, match=r"500.*has 500 tokens"):
        params.check_vocabulary(500)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)  # type: ignore[arg-type]


def test_an_id_of_thousands_of_digits_is_refused_without_writing_it_out() -> None:
    with pytest.raises(InvalidRequestError, match="integer of 16610 bits"):
        SamplingParams(stop_token_ids=(10**5000,)).check_vocabulary(500)
