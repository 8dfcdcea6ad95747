"""``layby generate``: prompts in, their continuations out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layby.cli.flags import engine_flags, sampling_flags, takes
from layby.cli.terminal import STDOUT, JsonTarget, log_to_stderr, show_text, write_json
from layby.engine import EngineConfig
from layby.sampling_params import SamplingParams

if TYPE_CHECKING:
    from layby.engine import LLM, RequestOutput


# Here, --seed is the request's own; prompts given all at once are never too many for the queue.
@takes(
    sampling=sampling_flags(max_tokens=256),
    engine=engine_flags(without=("seed",), max_queue=None, shed_load=False),
)
def generate(
    *,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to go on from.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Take prompts from this file, too, one per line; -: from standard input.",
            show_default="none",
        ),
    ] = None,
    json: JsonTarget = None,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Continue texts. For a conversation with the model, there is: layby chat."""
    texts = [*(prompts or []), *(_lines(file) if file is not None else [])]
    if not texts and file is not None:
        raise typer.BadParameter(f"{file} holds no prompt, only empty lines", param_hint="--file")
    if not texts:
        raise typer.BadParameter("give a PROMPT, or some in a --file", param_hint="PROMPT")
    from layby.engine import LLM

    log_to_stderr()
    with LLM(**asdict(engine)) as llm:
        if json is None and len(texts) == sampling.n == 1 and sys.stdout.isatty():
            _show_as_it_comes(llm, texts[0], sampling)
            return
        results = llm.generate(texts, sampling)
    if json is not None:
        write_json(json, [_as_data(result) for result in results])
    if json != STDOUT:
        _show(results)
    for result in results:
        if result.error is not None:
            raise result.error


def _lines(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == STDOUT else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"cannot read {file}: {why}", param_hint="--file") from error
    return [line for line in text.splitlines() if line.strip()]


def _show_as_it_comes(llm: LLM, prompt: str, sampling: SamplingParams) -> None:
    line_end = ""  # none is due before there is anything on the line
    try:
        with closing(llm.stream(prompt, sampling)) as deltas:
            for delta in deltas:
                show_text("".join(piece.text for piece in delta.outputs))
                line_end = "\n"
    finally:
        show_text(line_end)


def _show(results: Sequence[RequestOutput]) -> None:
    """Texts as they are; with a heading each, as ``head`` and ``tail`` do it, if they are many."""
    several = len(results) > 1 or len(results[0].outputs) > 1
    for number, result in enumerate(results, 1):
        for output in result.outputs:
            if several:
                sample = f", sample {output.index + 1}" if len(result.outputs) > 1 else ""
                show_text(f"==> prompt {number}{sample} <==\n")
            show_text(output.text + "\n")


def _as_data(result: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": result.prompt,
        "prompt_token_ids": result.prompt_token_ids,
        "prompt_logprobs": result.prompt_logprobs
        and [entry and asdict(entry) for entry in result.prompt_logprobs],
        "outputs": [
            {
                "index": output.index,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "logprobs": output.logprobs and [asdict(entry) for entry in output.logprobs],
            }
            for output in result.outputs
        ],
        "error": None if result.error is None else str(result.error),
        "ttft_s": result.ttft_s,
        "e2e_s": result.e2e_s,
    }
