"""``--elastic-memory`` under a limit, beside a neighbour that takes most of what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layby.engine.memory import available_host_bytes

GIB = 2**30
MOUNT = Path("/sys/fs/cgroup")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or available_host_bytes() < 2 * GIB, reason="takes 1 GiB of RAM"
)


@pytest.fixture
def stand_in(tmp_path: Path) -> tuple[Path, Path]:
    """A tree that looks as ``/`` does to a process in a cgroup with a limit."""
    group = tmp_path / "sys/fs/cgroup/layby"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/layby\n")
    (group / "memory.high").write_text("max\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    return tmp_path, group


@pytest.fixture
def real_group() -> Iterator[tuple[Path, Path]]:
    """A new cgroup (v2) of this machine, if it lets us make one that can have a limit."""
    try:
        if "memory" not in (MOUNT / "cgroup.subtree_control").read_text().split():
            pytest.skip("cgroups (v2) of this machine cannot have a memory limit")
        group = MOUNT / f"layby-test-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup (v2) can be made here: {error}")
    yield Path("/"), group
    group.rmdir()


def serve_beside_a_hog(root: Path, group: Path) -> dict[str, Any]:
    """Run the process, within the group if that is a real one."""
    command = [sys.executable, "-m", "tests.e2e.elastic_process", str(root), str(group)]
    if root == Path("/"):
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("where", ["stand_in", "real_group"])
def test_beside_a_hog_the_pool_shrinks_and_comes_back_and_every_answer_is_the_same(
    where: str, request: pytest.FixtureRequest
) -> None:
    """The process has a limit, a pool that fills most of it, and a neighbour that takes the rest.

    Nobody is killed: something is left at every look. Real memory in both cases; the stand-in's
    limit is one that nobody enforces.
    """
    report = serve_beside_a_hog(*request.getfixturevalue(where))
    assert report["same"]
    assert report["aborted"] == 0
    assert report["undisturbed"] == {"blocks": 800, "shrinks": 0}
    assert report["small_blocks"] < 500
    assert report["full_mib"] - report["small_mib"] > 60
    assert report["least_room_mib"] > 0
