"""The engine's loop: what is refused, how texts end, who fails, and what is counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from layby.engine import LLM, RequestOutput
from layby.engine.toy import ByteTokenizer
from layby.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestFailedError,
    RequestTooLargeError,
)
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import StepPlan
from tests.engine.harness import Harness, collect, spell


def answer(harness: Harness, prompt: str, params: SamplingParams) -> RequestOutput:
    """Run one request and check that its streamed pieces are consistent."""
    request_id = harness.engine.add_request(prompt, params)
    return harness.run()[request_id]


# --- texts and their ends ---


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "reason", "stop_reason", "num_tokens"),
    [
        (("DEFGHIJ",), 20, "ABC", "stop", "DEFGHIJ", 10),
        (("DEFGHIX",), 10, "ABCDEFGHIJ", "length", None, 10),
        (("DEFGHIJ",), 6, "ABCDEF", "length", None, 6),
        (("DEF", "DEFGH"), 20, "ABC", "stop", "DEF", 6),
        (("DEFGH", "DEF"), 20, "ABC", "stop", "DEF", 6),
        ((), 20, "ABCDEFGHIJ", "stop", None, 11),
        (("J",), 10, "ABCDEFGHI", "stop", "J", 10),
    ],
)
def test_case_12_stop_strings_over_tokens(
    stop: tuple[str, ...],
    max_tokens: int,
    text: str,
    reason: str,
    stop_reason: str | None,
    num_tokens: int,
) -> None:
    """A stop string found with the very last token allowed still counts as a stop."""
    harness = Harness(script=spell("ABCDEFGHIJ"))
    params = SamplingParams(max_tokens=max_tokens, stop=stop, logprobs=0)
    [output] = answer(harness, "x", params).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (text, reason, stop_reason)
    assert len(output.token_ids) == num_tokens
    assert output.logprobs is not None
    assert len(output.logprobs) == num_tokens


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_case_13_a_character_cut_by_max_tokens_counts_its_tokens(max_tokens: int) -> None:
    """The text is what decoding all the tokens at once gives, wherever the cut is."""
    data = "a你好🎉é".encode()
    harness = Harness(script=spell(data))
    [output] = answer(harness, "x", SamplingParams(max_tokens=max_tokens, n=1)).outputs
    assert output.token_ids == list(data[:max_tokens])
    assert output.text == data[:max_tokens].decode(errors="replace")


def test_case_13_interleaved_samples_do_not_mix_their_bytes() -> None:
    texts = ["你好🎉", "é🎉a"]
    harness = Harness(script=lambda sample, index: spell(texts[sample.index])(sample, index))
    outputs = answer(harness, "x", SamplingParams(max_tokens=30, n=2)).outputs
    assert [output.text for output in outputs] == texts
    assert [output.finish_reason for output in outputs] == ["stop", "stop"]


def test_a_stop_string_ends_one_sample_and_leaves_the_other_alone() -> None:
    texts = ["abXYcd", "abcdefgh"]
    harness = Harness(script=lambda sample, index: spell(texts[sample.index])(sample, index))
    outputs = answer(harness, "x", SamplingParams(max_tokens=30, n=2, stop=("XY",))).outputs
    assert [output.text for output in outputs] == ["ab", "abcdefgh"]
    assert [output.stop_reason for output in outputs] == ["XY", None]
    assert [len(output.token_ids) for output in outputs] == [4, 9]


def test_a_stop_token_is_a_token_of_the_answer_but_not_of_its_text() -> None:
    harness = Harness(script=spell("abc.def"))
    params = SamplingParams(max_tokens=30, stop_token_ids=(ord("."),), stop=("c?",))
    [output] = answer(harness, "x", params).outputs
    assert (output.text, output.stop_reason) == ("abc", ord("."))
    assert output.token_ids == list(b"abc.")


def test_min_tokens_lets_early_stops_pass() -> None:
    harness = Harness(script=spell("a.b.c"))
    by_token = SamplingParams(max_tokens=30, min_tokens=2, stop_token_ids=(ord("."),))
    assert answer(harness, "x", by_token).outputs[0].text == "a.b"
    by_string = SamplingParams(max_tokens=30, min_tokens=2, stop=(".",))
    assert answer(harness, "x", by_string).outputs[0].text == "a.b"


def test_ignore_eos_goes_on_to_the_length() -> None:
    harness = Harness(script=spell("ab"))
    [output] = answer(harness, "x", SamplingParams(max_tokens=5, ignore_eos=True)).outputs
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("ab", "length", 5)


def test_prompt_logprobs_come_with_the_first_delta_however_the_prompt_was_chunked() -> None:
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=4)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    request_id = harness.engine.add_request("abcdefghij", params)
    deltas = []
    while harness.engine.has_unfinished:
        deltas += harness.engine.step()
    assert [delta.request_id for delta in deltas] == [request_id] * 2
    logprobs = deltas[0].prompt_logprobs
    assert logprobs is not None
    assert logprobs[0] is None
    assert [one.chosen.token_id for one in logprobs[1:] if one] == list(b"bcdefghij")
    assert deltas[1].prompt_logprobs is None


# --- what is refused ---


def test_case_14_an_empty_prompt_is_refused_and_the_next_request_is_fine() -> None:
    harness = Harness()
    llm = LLM.from_engine(harness.engine)
    empty: list[str | list[str | list[int]]] = ["", [""], [], [[]]]
    for prompts in empty:
        with pytest.raises(InvalidRequestError, match="empty") as caught:
            llm.generate(prompts)
        assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: prompt is empty"):
        llm.generate(["a", ""])
    no_messages: list[list[list[dict[str, str]]]] = [[], [[]]]
    for messages in no_messages:
        with pytest.raises(InvalidRequestError, match="messages is empty") as caught:
            llm.chat(messages)
        assert caught.value.param == "messages"
    assert harness.executor.plans == []
    assert llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].text == "abc"


def test_case_14_a_model_with_a_bos_token_takes_an_empty_prompt() -> None:
    harness = Harness()
    harness.tokenizer.add_bos = True
    assert answer(harness, "", SamplingParams(max_tokens=2)).outputs[0].text == "ab"


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ("x", {"logit_bias": {99999999: 5.0}}, "logit_bias", "99999999.*258 tokens"),
        ("x", {"stop_token_ids": (2**31,)}, "stop_token_ids", "2147483648.*258 tokens"),
        ([1, 99999999], {}, "prompt", r"prompt\[1\] is token id 99999999.*258 tokens"),
        ([-1], {}, "prompt", r"prompt\[0\] is token id -1"),
        ([1.5], {}, "prompt", r"prompt\[0\] must be a token id, got 1\.5"),
        (b"x", {}, "prompt", "a string or a list of token ids, got bytes"),
        ("x" * 256, {}, "prompt", "256 tokens; the context holds 256"),
        ("x" * 250, {"max_tokens": 7}, "max_tokens", "250 .* 7, together 257; .* holds 256"),
        ("x" * 250, {"max_tokens": None, "min_tokens": 7}, "min_tokens", "250 .* 7; .* 256"),
        ("x", {"n": 65}, "n", "65"),
    ],
)
def test_case_15_a_bad_request_is_refused_and_its_neighbour_untouched(
    prompt: object, params: dict[str, object], param: str, message: str
) -> None:
    harness = Harness()
    healthy = harness.engine.add_request("a", SamplingParams(max_tokens=4))
    with pytest.raises(InvalidRequestError, match=message) as caught:
        harness.engine.add_request(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert harness.run()[healthy].outputs[0].text == "abcd"


@pytest.mark.parametrize("key", ["AI", -1])
def test_case_15_a_bias_on_something_that_is_no_token_id_is_refused(key: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logit_bias={key: 1.0})  # type: ignore[dict-item]
    assert caught.value.param == "logit_bias"


def test_a_request_bigger_than_the_pool_is_refused_with_both_numbers() -> None:
    harness = Harness(num_blocks=10)
    with pytest.raises(RequestTooLargeError) as caught:
        harness.engine.add_request("x" * 170, SamplingParams(max_tokens=4))
    assert (caught.value.needed_blocks, caught.value.total_blocks) == (11, 10)
    assert answer(harness, "x" * 16, SamplingParams(max_tokens=4)).outputs[0].text == "abcd"


def test_open_max_tokens_fill_the_context_or_the_pool() -> None:
    """160 positions and the last token, which is never stored, are 11 + 150 tokens."""
    params = SamplingParams(max_tokens=None)
    assert len(answer(Harness(), "x" * 200, params).outputs[0].token_ids) == 56
    assert len(answer(Harness(num_blocks=10), "x" * 150, params).outputs[0].token_ids) == 11


def test_an_id_that_is_in_progress_is_refused_and_free_again_afterwards() -> None:
    harness = Harness()
    harness.engine.add_request("a", SamplingParams(max_tokens=2), request_id="mine")
    with pytest.raises(InvalidRequestError, match="'mine'") as caught:
        harness.engine.add_request("b", request_id="mine")
    assert caught.value.param == "request_id"
    assert harness.run()["mine"].outputs[0].text == "ab"
    harness.engine.add_request("a", request_id="mine")


def test_seeds_are_the_callers_or_drawn_from_the_engines() -> None:
    def seeds(seed: int | None, *params: SamplingParams) -> list[object]:
        engine = Harness(seed=seed).engine
        requests = [engine.prepare("x", one).request for one in params]
        return [request.payload.seed for request in requests]  # type: ignore[attr-defined]

    open_seed, own_seed = SamplingParams(), SamplingParams(seed=7)
    assert seeds(1, own_seed) == [7]
    assert seeds(1, open_seed, open_seed) == seeds(1, open_seed, open_seed)
    assert seeds(1, open_seed) != seeds(2, open_seed)
    assert len(set(seeds(None, open_seed, open_seed))) == 2


# --- ends that come from outside, and faults ---


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_case_11_an_aborted_group_is_gone_at_once(steps: int) -> None:
    """n=2, a hundred times, while waiting, in its first step and later."""
    harness = Harness()
    for _ in range(100):
        request_id = harness.engine.add_request("x" * 20, SamplingParams(max_tokens=200, n=2))
        for _ in range(steps):
            harness.engine.step()
        delta = harness.engine.abort(request_id)
        assert delta is not None
        assert delta.finished
        assert delta.error is None
        assert [piece.finish_reason for piece in delta.outputs] == ["abort", "abort"]
        assert not harness.engine.has_unfinished
        harness.check_idle()
    assert harness.engine.abort("unknown") is None
    assert len(harness.executor.released) == 100
    assert harness.engine.stats().requests_aborted == 100


def test_case_11_an_aborted_parked_group_gives_back_its_swap_blocks() -> None:
    harness = Harness(num_blocks=16, enable_prefix_caching=False)
    ids = [
        harness.engine.add_request("x" * 40, SamplingParams(max_tokens=80, n=2)) for _ in range(2)
    ]
    while not harness.engine.stats().swapped:
        harness.engine.step()
    assert harness.engine.stats().swap_usage > 0
    harness.engine.abort(ids[1])
    assert harness.engine.stats().swap_usage == 0
    assert len(harness.run()[ids[0]].outputs[1].token_ids) > 0


def test_held_back_text_comes_with_the_abort() -> None:
    harness = Harness(script=spell("abcdef"))
    request_id = harness.engine.add_request("x", SamplingParams(stop=("bcdX",)))
    answers: dict[str, RequestOutput] = {}
    for _ in range(3):
        for delta in harness.engine.step():
            collect(answers, delta)
    last = harness.engine.abort(request_id)
    assert last is not None
    assert collect(answers, last).outputs[0].text == "abc"


def test_a_request_that_fails_alone_ends_with_its_error() -> None:
    """Its placeholder token must not show, and its neighbours go on."""
    harness = Harness()
    ids = [harness.engine.add_request("x", SamplingParams(max_tokens=4)) for _ in range(3)]
    harness.engine.step()
    harness.executor.failing_requests.add(ids[1])
    answers = harness.run()
    assert [answers[one].outputs[0].text for one in (ids[0], ids[2])] == ["bcd", "bcd"]
    [failed] = answers[ids[1]].outputs
    assert (failed.text, failed.token_ids, failed.finish_reason) == ("", [], "error")
    error = answers[ids[1]].error
    assert isinstance(error, RequestFailedError)
    assert "told to fail it" in str(error)
    assert harness.metric("vllm:request_success_total", finished_reason="error") == 1


def test_a_fault_while_detokenising_fails_that_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Token 999 has no bytes: the tokenizer raises for one of the two."""

    def script(sample: object, index: int) -> int:
        bad = sample.request.request_id == "bad" and index == 2  # type: ignore[attr-defined]
        return 999 if bad else ord("a") + index

    harness = Harness(script=script)
    for name in ("good", "bad"):
        harness.engine.add_request("x", SamplingParams(max_tokens=5), request_id=name)
    answers = harness.run()
    assert answers["good"].outputs[0].text == "abcde"
    assert answers["bad"].outputs[0].finish_reason == "error"
    assert answers["bad"].outputs[0].text == "ab"
    assert "IndexError" in str(answers["bad"].error)
    assert "request bad failed" in caplog.text


def test_a_failed_step_fails_what_was_in_flight_and_the_engine_is_dead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness(max_num_seqs=1)
    ids = [harness.engine.add_request("x", SamplingParams(max_tokens=9)) for _ in range(2)]
    harness.engine.step()

    def broken(plan: StepPlan) -> None:
        raise RuntimeError("the device is on fire")

    harness.executor.before_step = broken
    answers = harness.run()
    for one in ids:
        assert answers[one].outputs[0].finish_reason == "error"
        assert isinstance(answers[one].error, EngineDeadError)
        assert "RuntimeError: the device is on fire" in str(answers[one].error)
        assert "2 requests in flight" in str(answers[one].error)
    for use in (harness.engine.step, lambda: harness.engine.add_request("x")):
        with pytest.raises(EngineDeadError, match="on fire"):
            use()
    assert harness.engine.stats().requests_failed == 2
    assert "a step failed" in caplog.text


def test_a_scheduler_that_never_plans_anything_is_a_fault_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    request_id = harness.engine.add_request("x")
    monkeypatch.setattr(harness.scheduler, "_schedule_waiting", lambda step: None)
    answers = harness.run()
    assert "nothing was scheduled in 100 steps" in str(answers[request_id].error)


def test_a_closed_engine_takes_nothing_and_closes_its_executor_once() -> None:
    harness = Harness()
    harness.engine.close()
    harness.engine.close()
    assert harness.executor.closed == 1
    with pytest.raises(EngineUnavailableError, match="closed"):
        harness.engine.add_request("x")


def test_chat_uses_the_template_and_says_so_when_there_is_none() -> None:
    harness = Harness()
    messages = [{"role": "user", "content": "hi"}]
    assert harness.engine.render_chat(messages) == "user: hi\nassistant:"
    harness.engine.chat_template = None
    with pytest.raises(InvalidRequestError, match="toy has no chat template"):
        harness.engine.render_chat(messages)


def test_the_toy_tokenizer_shows_special_tokens_only_when_asked() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    ids = tokenizer.encode("é")
    assert ids == [256, 0xC3, 0xA9]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>é"
    assert tokenizer.token_text(257) == "</s>"


# --- what is counted ---


def test_latencies_are_those_of_the_clock() -> None:
    """A second per step: the first token of the second request waits for the first's end."""
    harness = Harness(max_num_seqs=1)
    ids = [harness.engine.add_request("x", SamplingParams(max_tokens=3)) for _ in range(2)]
    answers = harness.run()
    assert [answers[one].ttft_s for one in ids] == [1.0, 4.0]
    assert [answers[one].e2e_s for one in ids] == [3.0, 6.0]
    assert answers[ids[0]].outputs[0].itl_s == [1.0, 1.0]
    assert harness.metric("vllm:time_to_first_token_seconds_sum") == 5.0
    assert harness.metric("vllm:time_to_first_token_seconds_count") == 2
    assert harness.metric("vllm:inter_token_latency_seconds_sum") == 4.0
    assert harness.metric("vllm:inter_token_latency_seconds_count") == 4
    assert harness.metric("vllm:e2e_request_latency_seconds_sum") == 9.0
    assert harness.metric("vllm:prompt_tokens_total") == 2
    assert harness.metric("vllm:generation_tokens_total") == 6
    assert harness.metric("vllm:request_success_total", finished_reason="length") == 2


def test_two_engines_in_one_process_have_metrics_of_their_own() -> None:
    first, second = Harness(), Harness()
    answer(first, "x", SamplingParams(max_tokens=3))
    assert first.metric("vllm:generation_tokens_total") == 3
    assert second.metric("vllm:generation_tokens_total") == 0


def test_a_busy_engine_logs_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Idle time before the work does not dilute the rates."""
    harness = Harness(num_blocks=10)
    harness.clock.now += 1000.0
    with caplog.at_level(logging.INFO, logger="layby.engine"):
        answer(harness, "x" * 20, SamplingParams(max_tokens=22))
    assert [record.getMessage() for record in caplog.records] == [
        "running 1, waiting 0, swapped 0 | KV 20.0%, swap 0.0% | 2.0 tokens/s in, 1.0 tokens/s out",
        "running 1, waiting 0, swapped 0 | KV 30.0%, swap 0.0% | 0.0 tokens/s in, 1.0 tokens/s out",
    ]


def test_stats_read_as_a_mapping_too() -> None:
    stats = Harness().engine.stats()
    assert stats["num_blocks"] == stats.num_blocks == dict(stats)["num_blocks"] == 64
    assert stats.as_dict()["preemption_rate"] == 0.0
    with pytest.raises(KeyError):
        stats["as_dict"]


def test_a_step_that_is_broken_off_ends_the_engine() -> None:
    """Half a step done, scheduler and executor disagree: going on would mix up tokens."""
    harness = Harness()
    harness.engine.add_request("x")

    def interrupt(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    harness.executor.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        harness.engine.step()
    assert "broken off by KeyboardInterrupt" in str(harness.engine.error)
    assert not harness.engine.has_unfinished
    with pytest.raises(EngineDeadError):
        harness.engine.step()


class Untouchable(Sequence[int]):
    """A long list whose items nobody may look at."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        raise AssertionError("an item was looked at")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [(Untouchable(), "1000000000 tokens"), ("x" * 10_000, "10000 characters, more than the 1024")],
)
def test_a_prompt_beyond_the_context_is_refused_by_its_length(prompt: Any, says: str) -> None:
    harness = Harness()
    harness.tokenizer.encode = lambda *_: pytest.fail("encoded")  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match=says) as refusal:
        harness.engine.prepare(prompt)
    assert refusal.value.param == "prompt"


def test_stop_tokens_that_leave_nothing_to_begin_with_are_refused() -> None:
    """Every token ends the answer, but min_tokens wants one that does not."""
    harness = Harness()
    everything = tuple(range(harness.engine.vocab_size))
    with pytest.raises(InvalidRequestError, match="every one") as refusal:
        harness.engine.prepare("x", SamplingParams(stop_token_ids=everything, min_tokens=1))
    assert refusal.value.param == "stop_token_ids"
    # The model's own end is the last one missing.
    but_eos = tuple(token for token in everything if token != harness.tokenizer.EOS)
    with pytest.raises(InvalidRequestError, match="every one"):
        harness.engine.prepare("x", SamplingParams(stop_token_ids=but_eos, min_tokens=1))
    harness.engine.prepare(
        "x", SamplingParams(stop_token_ids=but_eos, min_tokens=1, ignore_eos=True)
    )
    harness.engine.prepare("x", SamplingParams(stop_token_ids=everything))


def test_stop_strings_are_prepared_before_the_engine_gets_them() -> None:
    prepared = Harness().engine.prepare("x", SamplingParams(stop=("aab",)))
    assert prepared.stops.tables == ([0, 1, 0],)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("params", "x"),
        ("params", {"temperature": 0}),
        ("priority", 1.5),
        ("priority", None),
        ("cache_salt", "\ud800"),
        ("cache_salt", 5),
        ("cache_salt", None),
        ("request_id", []),
        ("request_id", ""),
        ("request_id", "\ud800"),
        ("prompt", "\ud800"),
        ("prompt", {1: 2}),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(param: str, value: Any) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError, match=param) as refusal:
        harness.engine.add_request(**{"prompt": "x", param: value})
    assert refusal.value.param == param
    assert not harness.engine.has_unfinished
