"""A request that another process began goes on as if it had never been interrupted."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.engine import RequestOutput
from layby.engine.journal_records import RequestRecord
from layby.engine.toy import ByteTokenizer
from layby.errors import InvalidRequestError
from layby.sampling_params import SamplingParams
from layby.scheduling import Request
from layby.scheduling.request import FinishReason
from layby.scheduling.request import Sequence as Sample
from tests.engine.harness import Harness, collect


def babble(sample: Sample, _index: int) -> int:
    """A letter, half of a two-byte character or, seldom, EOS; made of all that may matter."""
    params = sample.request.payload
    assert isinstance(params, SamplingParams)
    text = f"{params.seed}/{sample.index}/{sample.tokens}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
    if number % 29 == 0 and sample.num_output_tokens >= params.min_tokens:
        return ByteTokenizer.EOS
    return b"abcde \xc3\xa9"[number % 8]


def run_to_end(harness: Harness, records: dict[str, RequestRecord]) -> None:
    while harness.engine.has_unfinished:
        step(harness, records)
    harness.check_idle()


def step(harness: Harness, records: dict[str, RequestRecord]) -> None:
    for delta in harness.engine.step():
        records[delta.request_id].add(delta)
    harness.scheduler.check_integrity()


def new_harness() -> Harness:
    """The largest of the calls below needs the whole device pool."""
    return Harness(
        script=babble,
        num_blocks=15,
        num_swap_blocks=6,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=48,
        max_queue=1,
    )


def start(harness: Harness, name: str, prompt: list[int], params: SamplingParams) -> RequestRecord:
    prepared = replace(harness.engine.prepare(prompt, params, request_id=name), was_accepted=True)
    harness.engine.submit(prepared)
    return RequestRecord.new(prompt, prepared.settled_params)


PARAMS = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 2, 3]),
    max_tokens=st.integers(1, 12),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    stop=st.sampled_from([(), (), ("ab",), ("é", "cd")]),
    min_tokens=st.integers(0, 1),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)


@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(1, 15), PARAMS), min_size=1, max_size=6),
    stops=st.lists(st.tuples(st.integers(0, 14), st.booleans()), max_size=3),
)
def test_interrupted_anywhere_the_answers_are_those_of_an_undisturbed_run(
    calls: list[tuple[int, SamplingParams]], stops: list[tuple[int, bool]]
) -> None:
    """Tokens, text, log-probabilities and reasons; with (``keeps``) and without saved tokens."""
    harness = new_harness()
    names = [f"R{number}" for number in range(len(calls))]
    records = {}
    for name, (length, params) in zip(names, calls, strict=True):
        records[name] = start(harness, name, [ord(name[1])] * length, params)
    undisturbed = new_harness()
    wanted = {
        name: start(undisturbed, name, record.prompt, record.params)
        for name, record in records.items()
    }
    run_to_end(undisturbed, wanted)

    for steps, keeps in stops:
        for _ in range(steps):
            if harness.engine.has_unfinished:
                step(harness, records)
        harness = new_harness()
        names = [f"{name}'" for name in names]
        records = {f"{name}'": record for name, record in records.items()}
        generated_before = 0
        for name, record in records.items():
            if record.is_finished:
                continue
            if not (keeps and record.has_started):
                records[name] = record = RequestRecord.new(record.prompt, record.params)
            resume(harness, name, record)
            generated_before += sum(len(sample.token_ids) for sample in record.samples)
    run_to_end(harness, records)

    assert [records[name] for name in names] == list(wanted.values())
    if stops:
        live = sum(
            len(sample.token_ids) for record in records.values() for sample in record.samples
        )
        assert harness.engine.stats().generation_tokens <= live  # nothing twice


def resume(harness: Harness, name: str, record: RequestRecord) -> None:
    prepared = harness.engine.prepare_again(
        record.prompt, record.params, priority=0, cache_salt="", age_s=5.0,
        outputs=[(list(s.token_ids), s.finish_reason) for s in record.samples]
        if record.has_started else (),
    )  # fmt: skip
    prepared.request.request_id = name
    harness.engine.submit(prepared)


def test_saved_tokens_are_not_generated_again_but_their_kv_is_computed() -> None:
    harness = Harness()
    params = SamplingParams(max_tokens=10, seed=1)
    prepared = harness.engine.prepare_again(
        list(b"hello"), params, priority=0, cache_salt="", age_s=7.0,
        outputs=[(list(b"abcdef"), None)],
    )  # fmt: skip
    name = harness.engine.submit(prepared)
    answers: dict[str, RequestOutput] = {}
    while harness.engine.has_unfinished:
        for delta in harness.engine.step():
            collect(answers, delta)
    assert answers[name].outputs[0].text == "ghij"
    assert harness.executor.plans[0].num_tokens == len("hello") + len("abcdef")
    stats = harness.engine.stats()
    assert stats.generation_tokens == 4
    assert stats.recomputed_tokens == len("hello") + len("abcdef") - 1
    # Its first token came long ago; its end is that of a request which came 7 s before the start.
    assert harness.metric("vllm:time_to_first_token_seconds_count") == 0
    assert harness.metric("vllm:e2e_request_latency_seconds_sum") == 7 + 4


def test_what_was_accepted_finds_a_place_in_a_full_queue() -> None:
    harness = Harness(max_num_seqs=1, max_queue=0)
    harness.engine.add_request("x")
    params = SamplingParams(max_tokens=4, seed=1)
    again = harness.engine.prepare_again([1], params, priority=0, cache_salt="", age_s=0)
    harness.engine.submit(again)
    assert len(harness.run()) == 2


@pytest.mark.parametrize(
    "outputs",
    [
        [([1], None)],
        [([1], None), ([], None)],
        [([1], FinishReason.STOP), ([1], FinishReason.STOP)],
        [([1, 2, 3], None), ([1, 2], None)],
        [([1, 2, 3, 4], FinishReason.LENGTH), ([1, 2], None)],
    ],
)
def test_samples_that_cannot_have_been_left_like_that_are_refused(
    outputs: list[tuple[list[int], FinishReason | None]],
) -> None:
    request = Request("R", [1], max_tokens=3, n=2)
    with pytest.raises(ValueError, match="R"):
        request.continue_from(outputs)
    harness = Harness()
    params = SamplingParams(n=2, max_tokens=3)
    with pytest.raises(InvalidRequestError):
        harness.engine.prepare_again(
            [1], params, priority=0, cache_salt="", age_s=0,
            outputs=[(tokens, reason and reason.value) for tokens, reason in outputs],
        )  # fmt: skip
