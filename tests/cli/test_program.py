"""The program as a whole: help, flags, errors and exit codes."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import layby
import layby.engine.llm
import layby.server
from layby.cli import main
from layby.cli.flags import engine_flags, sampling_flags, takes, with_flags
from layby.engine import EngineConfig
from layby.errors import ConfigError
from layby.models import hub
from layby.sampling_params import SamplingParams
from tests.cli.harness import Toy

PROGRAM = [sys.executable, "-c", "import sys; from layby.cli import main; sys.exit(main())"]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    program = PROGRAM if code is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The help of a command, as one line."""
    assert main([*command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


def flag_text(text: str, name: str) -> str:
    """What a help says of one flag, up to the next flag."""
    flag = f" --{name.replace('_', '-')} "
    assert flag in text, f"no flag{flag}"
    description = text.partition(flag)[2]
    if description.startswith("/ --no-"):
        description = description.partition(" ")[2].partition(" ")[2]
    return description.partition(" --")[0]


# --- help ---


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_program_alone_shows_its_commands(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for command in ("serve", "generate", "chat", "bench", "model"):
        assert f"\n  {command} " in out


@pytest.mark.parametrize("group", ["bench", "model"])
def test_a_group_alone_shows_its_commands(capsys: pytest.CaptureFixture[str], group: str) -> None:
    assert main([group]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"layby {layby.__version__}\n"


@pytest.mark.parametrize(
    "command", [("serve",), ("generate",), ("chat",), ("bench", "offline")], ids=" ".join
)
def test_every_engine_setting_is_a_flag_with_help_unit_and_default(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """A setting that has no flag, or a flag that has drifted from its setting."""
    text = help_of(capsys, *command)
    for option in dataclasses.fields(EngineConfig):
        if option.name == "seed" and command != ("serve",):
            continue  # the request's own seed has that name there
        described = flag_text(text, option.name)
        # A word may be broken at its hyphen where the line ends.
        assert option.metadata["help"].replace(" ", "") in described.replace(" ", "")
        if option.metadata["unit"]:
            assert f"({option.metadata['unit']})" in described
        assert "default: " in described or "Default: " in described


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_parameter_is_a_flag_with_help_and_default(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = help_of(capsys, command)
    for option in dataclasses.fields(SamplingParams):
        if command == "chat" and option.name in ("n", "logprobs", "prompt_logprobs"):
            continue
        assert "default: " in flag_text(text, option.name)


@pytest.mark.parametrize(
    "name", ["num_prompts", "input_len", "output_len", "n", "temperature", "seed", "json"]
)
def test_every_flag_of_the_benchmark_has_a_default(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert "default: " in flag_text(help_of(capsys, "bench", "offline"), name)


# --- flags ---


def made_by(group: Any, *arguments: str) -> Any:
    """The object that the flags of a group make of these arguments."""
    import typer
    from typer.main import get_command

    made = []

    @takes(value=group)
    def command(*, value: Any) -> None:
        made.append(value)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    get_command(app).main(args=list(arguments), standalone_mode=False)
    return made[0]


def test_without_flags_the_defaults_are_those_of_the_classes() -> None:
    assert made_by(engine_flags()) == EngineConfig()
    assert made_by(sampling_flags()) == SamplingParams()


def test_flags_reach_their_fields_with_the_right_types() -> None:
    assert made_by(
        engine_flags(),
        *("--num-blocks", "64", "--swap-gib", "0.5", "--no-enable-prefix-caching"),
        *("--preemption-mode", "swap", "--max-queue", "none", "--seed", "3"),
    ) == EngineConfig(
        num_blocks=64,
        swap_gib=0.5,
        enable_prefix_caching=False,
        preemption_mode="swap",
        max_queue=None,
        seed=3,
    )
    assert made_by(
        sampling_flags(),
        *("--stop", "a b", "--stop", "c", "--stop-token-ids", "7", "--logit-bias", "5=-1.5"),
        *("--ignore-eos", "--logprobs", "2", "--max-tokens", "none"),
    ) == SamplingParams(
        stop=("a b", "c"),
        stop_token_ids=(7,),
        logit_bias={5: -1.5},
        ignore_eos=True,
        logprobs=2,
        max_tokens=None,
    )


def test_the_model_may_be_named_with_or_without_a_flag_but_not_twice() -> None:
    flags = engine_flags(model_argument=True)
    assert made_by(flags, "a.gguf").model == "a.gguf"
    assert made_by(flags, "--model", "a.gguf").model == "a.gguf"
    with pytest.raises(ConfigError, match="two models"):
        made_by(flags, "a.gguf", "--model", "b.gguf")


def test_serve_hands_everything_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        layby.server, "serve", lambda config, **options: calls.append((config, options))
    )
    monkeypatch.setenv("LAYBY_API_KEY", "one two")
    flags = ["--num-blocks", "9", "--drain-timeout", "2", "--admin-api-key", "three"]
    assert main(["serve", "m.gguf", *flags]) == 0
    monkeypatch.delenv("LAYBY_API_KEY")
    arguments = ["serve", "--host", "::", "--port", "0", "--state-dir", "state"]
    assert main([*arguments, "--keep-results", "9", "--isolate-prefix-cache"]) == 0
    assert calls == [
        (
            EngineConfig(model="m.gguf", num_blocks=9),
            {
                "host": "127.0.0.1",
                "port": 8000,
                "api_key": ["one", "two"],
                "admin_api_key": "three",
                "drain_timeout_s": 2.0,
                "state_dir": None,
                "keep_results_s": None,
                "isolate_prefix_cache": False,
            },
        ),
        (
            EngineConfig(),
            {
                "host": "::",
                "port": 0,
                "api_key": None,
                "admin_api_key": None,
                "drain_timeout_s": 30.0,
                "state_dir": Path("state"),
                "keep_results_s": 9.0,
                "isolate_prefix_cache": True,
            },
        ),
    ]


def test_keeping_results_without_a_place_for_them_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "m.gguf", "--port", "0", "--keep-results", "9"]) == 1
    assert "without a --state-dir no results are kept" in capsys.readouterr().err


def test_every_option_of_the_server_has_a_flag() -> None:
    """An option of ``serve`` that the command line cannot reach."""
    options = set(inspect.signature(layby.server.serve).parameters)
    assert options == {
        *("config", "host", "port", "api_key", "admin_api_key", "drain_timeout_s"),
        *("state_dir", "keep_results_s", "isolate_prefix_cache"),
    }


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serv"], 2, "Did you mean 'serve'"),
        (["serve", "--num-block", "3"], 2, "--num-blocks"),
        (["serve", "--port", "99999"], 2, "'--port': must be at most 65535, got '99999'"),
        (["generate"], 2, "PROMPT"),
        (["generate", "x", "--num-blocks", "many"], 2, "must be an integer or none, got 'many'"),
        (["generate", "x", "--temperature", "hot"], 2, "must be a number, got 'hot'; see: layby"),
        (["serve", "--headroom", "nan"], 1, "--headroom must be a finite number"),
        (["generate", "x", "--dtype", "float8"], 2, "'bfloat16'"),
        (["generate", "x", "--file", "/nowhere/prompts"], 2, "/nowhere/prompts: No such file"),
        (["generate", "--file", os.devnull], 2, "holds no prompt"),
        (["generate", "x", "--json", "/nowhere/result"], 2, "/nowhere/result"),
        (["generate", "x", "--num-blocks", "0"], 1, "layby: --num-blocks must be "),
        (["chat", "--num-blocks", "9", "--kv-cache-gib", "1"], 1, "and --kv-cache-gib (1)"),
        (["generate", "x", "--top-p", "3"], 1, "--top-p must be in (0, 1], got 3.0; see: layby "),
        (["generate", "x", "--seed", str(2**70)], 1, "--seed must be between"),
        (["generate", "x", "--logit-bias", "4"], 1, "ID=BIAS"),
        (["generate", "x", "--model", "no-such-model"], 1, "no-such-model"),
        (["chat", "no-such-model"], 1, "tried: "),
        (["bench", "offline", "--num-prompts", "0"], 2, "'--num-prompts'"),
        (["chat", "/nowhere/model"], 1, "layby: no such file or directory: /nowhere/model\n"),
        (["bench", "offline", "--temperature", "200"], 1, "--temperature must be"),
        (["model", "verify", "no-such-model"], 1, "smollm2"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    if "temperature" in says:
        monkeypatch.setattr(layby.engine.llm, "LLM", Toy())
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("layby: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    for jargon in ("Value error", "Input should", "Errno"):
        assert jargon not in captured.err


def test_none_is_taken_for_every_setting_that_may_be_none() -> None:
    """A help that promises "none", for a flag that refuses the word."""
    for group, made in ((engine_flags, EngineConfig), (sampling_flags, SamplingParams)):
        hints = get_type_hints(made)
        names = [
            option.name
            for option in dataclasses.fields(made)
            if type(None) in get_args(hints[option.name])
        ]
        assert len(names) > 3
        words = [f"--{name.replace('_', '-')}=none" for name in names]
        for defaults in ({}, dict.fromkeys(names)):
            built = made_by(group(**defaults), *words)
            assert [getattr(built, name) for name in names] == [None] * len(names)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "num_blocks (3) and kv_cache_gib=1 differ",
            "--num-blocks (3) and --kv-cache-gib=1 differ",
        ),
        ("model must be a name", "--model must be a name"),
        ("model a has no chat template", "model a has no chat template"),
        ("the model's num_blocks_max", "the model's num_blocks_max"),
    ],
)
def test_settings_are_named_as_they_are_typed(message: str, shown: str) -> None:
    assert with_flags(message, ["model", "num_blocks", "kv_cache_gib"]) == shown


def test_an_error_of_the_system_that_nobody_foresaw_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

    monkeypatch.setattr(hub, "pull", full)
    assert main(["model", "pull", "smollm2"]) == 1
    assert capsys.readouterr() == ("", "layby: /some/file: No space left on device\n")


def test_ctrl_c_ends_the_program_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "pull", interrupted)
    assert main(["model", "pull", "smollm2"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("fault", ["KeyboardInterrupt", "RuntimeError from KeyboardInterrupt"])
def test_interrupted_while_it_loads_its_commands_it_says_nothing(fault: str) -> None:
    """That takes a tenth of a second, in which Ctrl-C was a traceback. What a class raises while
    it is made comes as a RuntimeError."""
    raised, _, cause = fault.partition(" from ")
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'layby.cli.bench':\n"
        f"            raise {raised} from {cause or None}()\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from layby.cli import main\n"
        "sys.exit(main())\n"
    ).replace("from None()", "from None")
    process = run("--version", code=code)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["serve", "--help"], ["--version"]])
def test_a_reader_that_goes_away_gets_no_traceback(arguments: list[str]) -> None:
    """Noise after ``layby … | head -1``."""
    code = (
        "import sys\n"
        "from layby.cli import main\n"
        "sys.stdin.read()\n"  # until the other end of our stdout is closed
        f"sys.exit(main({arguments!r}))\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert errors == b""
    assert process.returncode == 1


def test_help_loads_neither_torch_nor_the_server_and_is_fast() -> None:
    """Someone who looks up a flag waits for a model library to load."""
    heavy = run(
        "serve",
        "--help",
        code=(
            "import sys; from layby.cli import main; main(); "
            "print([name for name in ('torch', 'fastapi', 'uvicorn', 'numpy', 'rich', "
            "'huggingface_hub', 'asyncio', 'prometheus_client') if name in sys.modules], "
            "file=sys.stderr)"
        ),
    )
    assert heavy.stderr == "[]\n"
    began = time.monotonic()
    assert run("--help").returncode == 0
    # Half a second on an idle machine; the tests of a busy one are not to fail for it.
    assert time.monotonic() - began < 3


# --- models ---


def test_models_are_listed_pulled_and_verified_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("LAYBY_HOME", str(tmp_path))
    assert main(["model", "list"]) == 0
    out = capsys.readouterr().out
    assert "smollm2" in out
    assert "not here" in out
    assert "93 MB" in out  # the download
    assert "98 MB" in out  # the file
    path = hub.known_path("smollm2")
    monkeypatch.setattr(hub, "pull", lambda name: hub.ModelFiles(name, "gguf", path))
    assert main(["model", "pull", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert main(["model", "verify", "smollm2"]) == 1
    assert "not on this machine" in capsys.readouterr().err
