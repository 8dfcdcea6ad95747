"""The KV of what a shutdown cuts off: written to a file, and brought back by the next process."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from layby.errors import InvalidRequestError, counted
from layby.execution.block_io import BlockFaultError, fault_of
from layby.execution.executor import Executor
from layby.execution.faults import Faults
from layby.execution.kv_file import KeptKV, KVFile, KVFileWriter
from layby.scheduling import KVPlace, Request, Scheduler

logger = logging.getLogger("layby.engine")

_MIB = 2**20


def key_of(request: Request) -> str:
    """A hash of everything that decides what a request's KV holds, and whose it is."""
    live = request.live_sequences
    shape = [request.n, [[seq.index, seq.num_tokens] for seq in live]]
    digest = hashlib.blake2b(request.salt + json.dumps(shape).encode(), digest_size=16)
    for seq in live:
        digest.update(array("q", seq.tokens).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class UnfinishedKV:
    """Where the KV of unfinished requests lies. It can be saved until the engine's next step.

    Attributes:
        executor: Has it.
        identity: What it depends on beside the tokens.
        places: Key and place of each request, the most urgent first.
    """

    executor: Executor
    identity: Mapping[str, str]
    places: list[tuple[str, KVPlace]]

    def save(self, path: Path, faults: Faults | None = None) -> int:
        """Write what there is to a file, as far as there is room; returns how many requests.

        Whatever the disk does costs a recompute of those requests in the next process, and a line
        in the log.
        """
        begun_s = time.monotonic()
        not_saved: list[str] = []
        num_blocks = num_bytes = 0
        try:
            with closing(
                KVFileWriter(path, self.executor.block_format, self.identity, faults)
            ) as writer:
                for key, (tier, tables) in self.places:
                    try:
                        writer.add(key, tables, partial(self.executor.export_blocks, tier))
                    except (OSError, BlockFaultError) as error:
                        not_saved.append(fault_of(error))
                num_blocks = writer.num_blocks
                num_bytes = writer.commit() if num_blocks else 0
        except (OSError, BlockFaultError) as error:
            not_saved = [fault_of(error)] * len(self.places)
        num_saved = len(self.places) - len(not_saved)
        if not_saved:
            logger.warning(
                "the KV cache of %s could not be saved (%s): it will be computed again",
                counted(len(not_saved), "request"),
                ", ".join(sorted(set(not_saved))),
            )
        if num_saved:
            logger.info(
                "saved the KV cache of %s (%s, %.1f MiB) in %.0f ms",
                counted(num_saved, "request"),
                counted(num_blocks, "block"),
                num_bytes / _MIB,
                1e3 * (time.monotonic() - begun_s),
            )
        return num_saved


def open_kept(
    path: Path,
    executor: Executor,
    identity: Mapping[str, str],
    scheduler: Scheduler,
    faults: Faults | None = None,
) -> KVFile | None:
    """What an earlier process saved; None if there is nothing, or nothing of use."""
    try:
        return KVFile(path, executor.block_format, identity, faults)
    except FileNotFoundError:
        return None
    except (OSError, BlockFaultError) as error:
        fault = fault_of(error)
        scheduler.metrics.count_fault(fault)
        logger.warning(
            "the KV cache in %s cannot be read (%s): it will be computed again", path, fault
        )
        return None


def bring_back(
    request: Request, name: str, kept: KeptKV, scheduler: Scheduler, executor: Executor
) -> bool:
    """Queue a request, ``name`` in the log, with the KV that an earlier process kept of it.

    Returns:
        False if that cannot be: the request is as it was. If its KV turns out to be unreadable,
        it is queued without.

    Raises:
        LaybyError: As ``Scheduler.add_request``.
    """
    try:
        place = scheduler.add_parked(request, kept.tables)
    except InvalidRequestError:
        raise
    except ValueError as error:
        logger.warning("the saved KV cache of request %s is of no use: %s", name, error)
        return False
    if place is None:
        logger.info("there is no room for the saved KV cache of request %s", name)
        return False
    if fault := _fill(place, kept, executor):
        scheduler.metrics.count_fault(fault)
        scheduler.lose_kv(request.request_id)
        logger.warning(
            "the saved KV cache of request %s cannot be read (%s): it will be computed again",
            name,
            fault,
        )
    else:
        kept.file.count_restored(kept.tables)
    return True


def _fill(place: KVPlace, kept: KeptKV, executor: Executor) -> str:
    """Fill a parked request's blocks; the fault in a word, empty if there is none."""
    targets = place.tables.blocks
    try:
        for part, content in kept.read():
            executor.import_blocks(place.tier, targets[part], content)
    except (OSError, BlockFaultError) as error:
        return fault_of(error)
    return ""
