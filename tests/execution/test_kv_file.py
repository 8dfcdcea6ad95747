"""The file that KV is kept in: there as a whole or not at all, and honest about every fault."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from layby.execution.block_io import BlockFaultError, fault_of
from layby.execution.executor import BlockFormat
from layby.execution.faults import Faults
from layby.execution.kv_file import KVFile, KVFileWriter, remove_kv_file
from layby.scheduling import KVTables

BLOCKS = BlockFormat("tests", 40)
OURS = {"model": "tiny"}
TABLES = KVTables((5, 9), ((7, 3), (7, 9, 4)))  # two samples share block 7
MANY = KVTables((800,), (tuple(range(200, 0, -1)),))


def content(blocks: Sequence[int]) -> memoryview:
    return memoryview(b"".join(bytes([block]) * 40 for block in blocks))


def write(path: Path, *requests: tuple[str, KVTables], faults: str = "") -> list[str]:
    """Returns the faults that befell."""
    faults_found = []
    writer = KVFileWriter(path, BLOCKS, OURS, Faults.parse(faults))
    try:
        for key, tables in requests:
            try:
                writer.add(key, tables, content)
            except (OSError, BlockFaultError) as error:
                faults_found.append(fault_of(error))
        writer.commit()
    finally:
        writer.close()
    return faults_found


def read(file: KVFile, key: str) -> bytes | None:
    kept = file.take(key)
    return None if kept is None else b"".join(bytes(part) for _, part in kept.read())


def test_what_was_written_is_read_and_shared_blocks_are_there_once(tmp_path: Path) -> None:
    write(tmp_path / "kv", ("a", TABLES), ("b", MANY))
    file = KVFile(tmp_path / "kv", BLOCKS, OURS)
    kept = file.take("a")
    assert kept is not None
    assert kept.tables == KVTables((5, 9), ((0, 1), (0, 2, 3)))
    assert b"".join(bytes(part) for _, part in kept.read()) == content([7, 3, 9, 4])
    assert read(file, "b") == content(MANY.blocks)
    file.close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o600


def test_each_takes_his_own_once(tmp_path: Path) -> None:
    write(tmp_path / "kv", ("a", TABLES), ("a", MANY))
    file = KVFile(tmp_path / "kv", BLOCKS, OURS)
    assert file.take("b") is None
    found = [file.take("a") for _ in range(3)]
    assert [kept and len(kept.tables.blocks) for kept in found] == [4, 200, None]
    file.close()


def test_before_it_is_complete_there_is_no_file(tmp_path: Path) -> None:
    write(tmp_path / "kv", ("old", TABLES))
    writer = KVFileWriter(tmp_path / "kv", BLOCKS, OURS)
    writer.add("a", TABLES, content)
    assert os.listdir(tmp_path) == ["kv.new"]  # the old one is stale from now on
    writer.close()
    assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        KVFile(tmp_path / "kv", BLOCKS, OURS)


def test_a_fault_while_writing_concerns_one_request(tmp_path: Path) -> None:
    requests = [(str(number), MANY) for number in range(20)]
    found = write(tmp_path / "kv", *requests, faults="state.write=eio:0.05,seed=1")
    assert 0 < found.count("eio") == len(found) < 20
    file = KVFile(tmp_path / "kv", BLOCKS, OURS)
    whole = [read(file, str(number)) for number in range(20)]
    assert whole.count(content(MANY.blocks)) == 20 - len(found)
    assert whole.count(None) == len(found)
    file.close()


def test_no_more_is_written_than_the_disk_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of what is free is left to others; who does not fit is left out."""
    real = os.statvfs(tmp_path)
    values = list(real)
    values[0:2], values[4] = [40, 40], 100  # bsize and frsize, and as many free as take 90 blocks
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    assert write(tmp_path / "kv", ("a", TABLES), ("b", MANY), ("c", TABLES)) == ["enospc"]
    file = KVFile(tmp_path / "kv", BLOCKS, OURS)
    assert [file.take(key) is not None for key in "abc"] == [True, False, True]
    file.close()


@pytest.mark.parametrize("kind", ["eio", "short", "corrupt"])
def test_a_fault_while_reading_is_told(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "kv", ("a", MANY))
    file = KVFile(tmp_path / "kv", BLOCKS, OURS)
    file._faults = Faults.parse(f"state.read={kind}:1")
    with pytest.raises((OSError, BlockFaultError)) as caught:
        read(file, "a")
    assert fault_of(caught.value) == {"corrupt": "checksum"}.get(kind, kind)
    file.close()


@pytest.mark.parametrize("at", [0, 39, 40 * 100, 40 * 200 - 1])
def test_a_wrong_byte_is_found_wherever_it_is(tmp_path: Path, at: int) -> None:
    write(tmp_path / "kv", ("a", MANY))
    data = bytearray((tmp_path / "kv").read_bytes())
    data[at] ^= 1
    (tmp_path / "kv").write_bytes(data)
    file = KVFile(tmp_path / "kv", BLOCKS, OURS)
    with pytest.raises(BlockFaultError, match="checksum"):
        read(file, "a")
    file.close()


def test_a_file_cut_off_or_changed_anywhere_in_its_index_is_of_no_use(tmp_path: Path) -> None:
    write(tmp_path / "kv", ("a", TABLES))
    data = (tmp_path / "kv").read_bytes()
    for size in range(0, len(data), 7):
        (tmp_path / "kv").write_bytes(data[:size])
        with pytest.raises(BlockFaultError):
            KVFile(tmp_path / "kv", BLOCKS, OURS)
    for at in range(40 * 4, len(data)):
        (tmp_path / "kv").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(BlockFaultError):
            KVFile(tmp_path / "kv", BLOCKS, OURS)


@pytest.mark.parametrize(
    ("blocks", "identity"),
    [
        (BlockFormat("other", 40), OURS),
        (BlockFormat("tests", 80), OURS),
        (BLOCKS, {"model": "other"}),
    ],
)
def test_blocks_of_others_are_given_to_nobody(
    tmp_path: Path, blocks: BlockFormat, identity: dict[str, str]
) -> None:
    write(tmp_path / "kv", ("a", TABLES))
    file = KVFile(tmp_path / "kv", blocks, identity)
    assert file.num_requests == 0
    assert file.take("a") is None
    file.close()


def test_removing_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "kv", ("a", TABLES))
    (tmp_path / "kv.new").write_bytes(b"x")
    for _ in range(2):
        remove_kv_file(tmp_path / "kv")
        assert not os.listdir(tmp_path)
