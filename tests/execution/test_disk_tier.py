"""The swap file: byte for byte, beside the loop, and honest about every fault."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layby.errors import ConfigError
from layby.execution.disk_tier import DiskTier
from layby.execution.faults import Faults
from layby.scheduling.plan import BlockMove, Transfer, TransferEnd
from tests.execution.harness import Blocks

NUM_RAM, NUM_DISK = 40, 300


def make_pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (NUM_RAM, 3, 37), dtype=torch.uint8, generator=generator)


@pytest.fixture
def pool() -> torch.Tensor:
    return make_pool()


@pytest.fixture
def disk(tmp_path: Path, pool: torch.Tensor) -> Iterator[DiskTier]:
    tier = DiskTier(str(tmp_path), pool, NUM_DISK)
    yield tier
    tier.close()


def transfer(number: int, sources: list[int], targets: list[int]) -> Transfer:
    moves = zip(sources, targets, strict=True)
    return Transfer(number, tuple(BlockMove(*move) for move in moves))


def wait_for(disk: DiskTier, count: int = 1) -> list[TransferEnd]:
    ends: list[TransferEnd] = []
    for _ in range(500):
        ends += disk.ends(wait_s=0.02)
        if len(ends) >= count:
            return ends
    raise AssertionError(f"{len(ends)} of {count} transfers ended")


def round_trip(disk: DiskTier, pool: torch.Tensor) -> list[TransferEnd]:
    """A block to disk and back to another place."""
    disk.begin([transfer(1, [3], [7])], [])
    ends = wait_for(disk)
    disk.begin([], [transfer(2, [7], [4])])
    return ends + wait_for(disk)


def test_blocks_come_back_byte_for_byte_wherever_they_lay(
    disk: DiskTier, pool: torch.Tensor
) -> None:
    """Scattered in RAM and on disk, more than one call's worth, several transfers at a time."""
    before = pool.clone()
    places = [Blocks(NUM_DISK, seed).take(NUM_RAM) for seed in range(2)]
    places[1] = list(range(150, 150 + NUM_RAM))  # one run
    order = Blocks(NUM_RAM, 2).take(NUM_RAM)
    for number, place in enumerate(places):
        disk.begin([transfer(number, order, place)], [])
        assert wait_for(disk) == [TransferEnd(number)]
        pool.zero_()
        elsewhere = Blocks(NUM_RAM, 3).take(NUM_RAM)
        halves = [
            transfer(10, place[:13], elsewhere[:13]),
            transfer(11, place[13:], elsewhere[13:]),
        ]
        disk.begin([], halves)
        assert {end.number for end in wait_for(disk, 2)} == {10, 11}
        assert torch.equal(pool[elsewhere], before[order])
        pool.copy_(before)


def test_the_file_has_no_name_and_all_its_bytes(tmp_path: Path, pool: torch.Tensor) -> None:
    """It must vanish with the process, be nobody else's to read, and never find the disk full."""
    directory = tmp_path
    disk = DiskTier(str(directory), pool, NUM_DISK)
    assert list(directory.iterdir()) == []
    status = os.fstat(disk._file)
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == NUM_DISK * 3 * 37
    assert status.st_blocks * 512 >= status.st_size
    disk.close()
    disk.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(disk._file)


def test_a_disk_without_the_room_is_an_error_with_both_numbers(
    tmp_path: Path, pool: torch.Tensor
) -> None:
    with pytest.raises(ConfigError, match=r"takes 1\d{9,} MiB.*MiB are free: No space left"):
        DiskTier(str(tmp_path), pool, 10**13)
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier("/dev/null/here", pool, 1)


def test_nobody_waits_for_the_disk(disk: DiskTier, pool: torch.Tensor) -> None:
    """A slow disk must not slow the loop; and what is read comes before what is written."""
    disk.begin([transfer(1, [0], [0])], [])
    wait_for(disk)
    gate, entered = threading.Event(), threading.Event()

    def until_gate() -> None:
        entered.set()
        gate.wait()

    started = time.monotonic()
    disk.begin([transfer(2, [1], [1])], [], until_gate)
    assert entered.wait(5)
    disk.begin([transfer(3, [2], [2])], [])
    disk.begin([], [transfer(4, [0], [5])])
    assert disk.ends() == []
    assert time.monotonic() - started < 0.5
    gate.set()
    assert [end.number for end in wait_for(disk, 3)] == [2, 4, 3]
    assert torch.equal(pool[5], pool[0])


def test_what_was_changed_on_disk_is_found_out(disk: DiskTier, pool: torch.Tensor) -> None:
    disk.begin([transfer(1, [0, 1], [5, 6])], [])
    wait_for(disk)
    os.pwrite(disk._file, b"?", 6 * 3 * 37 + 8)
    disk.begin([], [transfer(2, [5], [9]), transfer(3, [6], [10])])
    assert wait_for(disk, 2) == [TransferEnd(2), TransferEnd(3, "checksum")]


@pytest.mark.parametrize(
    ("spec", "faults"),
    [
        ("disk.read=eio:1", ["", "eio"]),
        ("disk.read=short:1", ["", "short"]),
        ("disk.read=corrupt:1", ["", "checksum"]),
        ("disk.write=eio:1", ["eio", "checksum"]),
        ("disk.write=enospc:1", ["enospc", "checksum"]),
        ("disk.write=short:1", ["short", "checksum"]),
    ],
)
def test_injected_faults_are_reported_by_name(
    tmp_path: Path, pool: torch.Tensor, spec: str, faults: list[str]
) -> None:
    """What was never written, read all the same, is no better than corrupt."""
    disk = DiskTier(str(tmp_path), pool, NUM_DISK, Faults.parse(spec))
    assert [end.fault for end in round_trip(disk, pool)] == faults
    disk.close()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (OSError(errno.EIO, "bad"), "eio"),
        (OSError(errno.EDQUOT, "full"), "enospc"),
        (OSError(errno.EBADF, "closed"), "other"),
        (RuntimeError("anything"), "other"),
    ],
    ids=str,
)
def test_whatever_the_system_says_the_thread_lives_on(
    disk: DiskTier, pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    """A thread that died would leave its requests waiting for ever."""

    def fail(*args: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        disk.begin([transfer(1, [3], [7])], [])
        assert wait_for(disk) == [TransferEnd(1, name)]
    assert [end.fault for end in round_trip(disk, pool)] == ["", ""]


def test_a_short_write_and_a_short_read_are_faults(
    disk: DiskTier, pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("pwritev", "preadv"):
        real = getattr(os, call)

        def one_byte_less(*args: object, real: object = real) -> int:
            return real(*args) - 1  # type: ignore[operator, no-any-return]

        with monkeypatch.context() as patch:
            patch.setattr(os, call, one_byte_less)
            assert "short" in [end.fault for end in round_trip(disk, pool)]


def test_faults_are_drawn_at_their_rates_and_repeat_with_the_seed() -> None:
    spec = "disk.read=eio:0.1, disk.read=corrupt:0.2,seed=4"
    faults, again = Faults.parse(spec), Faults.parse(spec)
    draws = [faults.draw("disk.read") for _ in range(4000)]
    assert draws == [again.draw("disk.read") for _ in range(4000)]
    assert 300 < draws.count("eio") < 500
    assert 650 < draws.count("corrupt") < 950
    assert again.draw("disk.write") is None
    assert not Faults.parse("")
    assert Faults.parse("").draw("disk.read") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk.read", "not of the form"),
        ("disk.read=eio", "not of the form"),
        ("seed=x", "'seed=x'"),
        ("disk.read=enospc:0.1", "none of"),
        ("net.read=eio:0.1", "none of"),
        ("disk.read=eio:1.5", "from 0 to 1"),
        ("disk.read=eio:0.6,disk.read=short:0.6", r"disk\.read add up to 1\.2"),
    ],
)
def test_a_wish_for_faults_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    """A typo must not pass for a run without faults."""
    with pytest.raises(ConfigError, match=f"LAYBY_FAULTS.*{message}"):
        Faults.parse(text)
