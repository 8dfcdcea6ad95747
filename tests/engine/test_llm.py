"""LLM: lists in and out, in order; nothing half done after a refusal or an interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from layby.engine import LLM
from layby.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTooLargeError,
)
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import StepPlan
from tests.engine.harness import Harness


def test_answers_come_in_the_order_of_the_prompts_whatever_ends_first() -> None:
    llm = LLM.from_engine(Harness().engine)
    params = [SamplingParams(max_tokens=count) for count in (9, 1, 5)]
    prompts: list[str | list[int]] = ["one", [116, 119, 111], "three"]
    answers = llm.generate(prompts, params)
    assert [answer.outputs[0].text for answer in answers] == ["abcdefghi", "a", "abcde"]
    assert [answer.prompt for answer in answers] == ["one", None, "three"]
    assert answers[1].prompt_token_ids == [116, 119, 111]
    assert all(answer.finished for answer in answers)
    assert [answer.e2e_s for answer in answers] == [9.0, 1.0, 5.0]


@pytest.mark.parametrize("prompts", ["text", [116, 101], ["text"], [[116, 101]]])
def test_one_prompt_is_a_list_of_one_answer(prompts: list[int]) -> None:
    llm = LLM.from_engine(Harness().engine)
    [answer] = llm.generate(prompts, SamplingParams(max_tokens=2, n=2, logprobs=1))
    assert [output.text for output in answer.outputs] == ["ab", "ab"]
    assert all(len(output.logprobs or ()) == 2 for output in answer.outputs)


def test_chat_takes_one_conversation_or_several() -> None:
    llm = LLM.from_engine(Harness().engine)
    conversation = [{"role": "user", "content": "hi"}]
    [answer] = llm.chat(conversation, SamplingParams(max_tokens=2))
    assert answer.prompt == "user: hi\nassistant:"
    answers = llm.chat([conversation, conversation], SamplingParams(max_tokens=2))
    assert len(answers) == 2
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]: .* no role 'robot'"):
        llm.chat([conversation, [{"role": "robot", "content": "hi"}]])


def test_a_stream_brings_every_step_and_ends_the_request_when_it_is_left() -> None:
    harness = Harness()
    llm = LLM.from_engine(harness.engine)
    pieces = [delta.outputs[0].text for delta in llm.stream("a", SamplingParams(max_tokens=3))]
    assert pieces == ["a", "b", "c"]
    stream = llm.stream("a", SamplingParams(max_tokens=30))
    assert next(stream).outputs[0].text == "a"
    stream.close()
    assert not harness.engine.has_unfinished
    harness.check_idle()
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        next(llm.stream(""))


def test_a_stream_passes_over_what_others_get_and_raises_when_its_request_fails() -> None:
    harness = Harness()
    llm = LLM.from_engine(harness.engine)
    other = harness.engine.add_request("b", SamplingParams(max_tokens=4))
    mine = list(llm.stream("a", SamplingParams(max_tokens=2)))
    assert len({delta.request_id for delta in mine} - {other}) == 1
    harness.executor.before_step = lambda plan: harness.executor.failing_requests.update(
        item.sequence.request.request_id for item in plan.scheduled
    )
    stream = llm.stream("a", SamplingParams(max_tokens=2))
    assert next(stream).finished
    with pytest.raises(RequestFailedError):
        next(stream)


def test_urgent_prompts_of_a_list_go_first() -> None:
    """One seat: the second prompt is served before the first."""
    llm = LLM.from_engine(Harness(max_num_seqs=1).engine)
    answers = llm.generate(["a", "b"], SamplingParams(max_tokens=2), priority=[1, 0])
    assert [answer.e2e_s for answer in answers] == [4.0, 2.0]


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["a", "x" * 300], InvalidRequestError, r"prompts\[1\]: the prompt has 300 tokens"),
        (["a", "b", [5, 999]], InvalidRequestError, r"prompts\[2\]: prompt\[1\] is token id 999"),
        (["a", "x" * 170], RequestTooLargeError, r"prompts\[1\]: .* pool has 10"),
    ],
)
def test_one_bad_prompt_is_named_and_nothing_runs(
    prompts: list[str], error: type[Exception], message: str
) -> None:
    """The last is found by the scheduler, when its neighbour is in the queue already."""
    harness = Harness(num_blocks=10)
    with pytest.raises(error, match=message):
        LLM.from_engine(harness.engine).generate(prompts)
    assert harness.executor.plans == []
    assert not harness.engine.has_unfinished
    harness.check_idle()


def test_as_many_params_and_priorities_as_prompts_are_wanted() -> None:
    llm = LLM.from_engine(Harness().engine)
    with pytest.raises(InvalidRequestError, match="params has 1 entry for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequestError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], priority=[1, 2, 3])


def test_a_queue_limit_holds_for_a_list_too() -> None:
    """Two run, four wait: the seventh of the list is refused, and the others with it."""
    harness = Harness(max_num_seqs=2, max_queue=4)
    llm = LLM.from_engine(harness.engine)
    assert len(llm.generate(["x"] * 6, SamplingParams(max_tokens=2))) == 6
    with pytest.raises(QueueFullError):
        llm.generate(["x"] * 7)
    harness.check_idle()


def test_an_interruption_inside_a_step_ends_the_engine() -> None:
    harness = Harness()
    llm = LLM.from_engine(harness.engine)

    def interrupt(plan: StepPlan) -> None:
        if plan.step == 3:
            raise KeyboardInterrupt

    harness.executor.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=9))
    harness.check_idle()
    with pytest.raises(EngineDeadError, match="broken off by KeyboardInterrupt"):
        llm.generate("a", SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompts": 5}, "prompt"),
        ({"prompts": None}, "prompt"),
        ({"prompts": (text for text in "ab")}, "prompt"),
        ({"prompts": {"a"}}, "prompt"),
        ({"prompts": {"prompt": "a"}}, "prompt"),
        ({"prompts": b"a"}, "prompt"),
        ({"prompts": [None]}, "prompt"),
        ({"prompts": [1.5]}, "prompt"),
        ({"prompts": ["a", 5]}, "prompt"),
        ({"params": "x"}, "params"),
        ({"params": {"temperature": 0}}, "params"),
        ({"params": ["x"]}, "params"),
        ({"params": 5}, "params"),
        ({"params": []}, "params"),
        ({"priority": 1.5}, "priority"),
        ({"priority": None}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"priority": [None]}, "priority"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(
    arguments: dict[str, Any], param: str
) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError, match=param) as refusal:
        LLM.from_engine(harness.engine).generate(**{"prompts": ["a"], **arguments})
    assert refusal.value.param == param
    assert harness.executor.plans == []


@pytest.mark.parametrize("messages", [5, "x", None, [5], [[5]], {"role": "user"}, [{}], ["x"]])
def test_what_is_no_conversation_is_refused_by_name(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages") as refusal:
        LLM.from_engine(Harness().engine).chat(messages)
    assert refusal.value.param == "messages"


def test_ctrl_c_takes_effect_between_two_steps() -> None:
    """The signal comes in the middle of step 3, which is finished; step 4 is not begun."""
    harness = Harness()
    llm = LLM.from_engine(harness.engine)
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(plan: StepPlan) -> None:
        if plan.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    harness.executor.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=9))
    assert len(harness.executor.plans) == 3
    assert signal.getsignal(signal.SIGINT) is handler
    harness.check_idle()
    assert llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].text == "abc"


def test_a_dead_engine_raises_and_a_failed_request_does_not() -> None:
    harness = Harness()
    llm = LLM.from_engine(harness.engine)
    harness.executor.before_step = lambda plan: harness.executor.failing_requests.update(
        item.sequence.request.request_id for item in plan.scheduled[:1]
    )
    answers = llm.generate(["a", "b"], SamplingParams(max_tokens=1))
    assert [answer.outputs[0].finish_reason for answer in answers] == ["error", "length"]
    assert answers[0].error is not None
    harness.executor.failing_steps[harness.executor.plans[-1].step + 1] = RuntimeError("broken")
    with pytest.raises(EngineDeadError, match="broken"):
        llm.generate("a")


def test_the_progress_bar_counts_requests(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM.from_engine(Harness().engine)
    llm.generate(["a", "b"], SamplingParams(max_tokens=3), progress=True)
    captured = capsys.readouterr()
    assert "2/2 requests" in captured.err
    assert captured.out == ""
    llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    assert capsys.readouterr().err == ""


def test_an_unknown_option_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="unknown option 'num_block'; did you mean num_blocks"):
        LLM(num_block=12)


def test_an_llm_is_closed_by_its_context() -> None:
    harness = Harness()
    with LLM.from_engine(harness.engine) as llm:
        assert llm.stats()["num_blocks"] == 64
        assert llm.tokenizer is harness.tokenizer
    assert harness.executor.closed == 1


def test_importing_the_engine_does_not_import_torch() -> None:
    """Keeps the command line quick, and the engine testable without torch."""
    code = "import sys, layby.engine; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
