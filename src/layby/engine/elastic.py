"""``--elastic-memory``: the KV pool follows the memory that is left, in steps that nobody notices.

Between two steps of the engine, once a second or more often, the signals are read and the advice of
``memory_signals`` becomes a *goal* for the device pool. A smaller pool is approached by a stage per
step, because whatever a stage gives up has to be parked, moved and handed back to the system, and
meanwhile nothing is computed.

On a CPU the swap pool lies in the same RAM, so parking would only take with one hand what the other
gives back. Therefore, from a reason to shrink until there is ample room again, its free blocks hold
no memory and :meth:`ElasticPool.price` makes parking dearer than computing again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from layby.engine.memory_signals import (
    AdviceSettings,
    MemorySource,
    PoolAdvisor,
    read_signals,
)
from layby.errors import ConfigError, counted
from layby.scheduling import MoveCosts, Scheduler

if TYPE_CHECKING:
    from layby.execution.kv_cache import KVCache

logger = logging.getLogger("layby.engine")

LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at the signals …"""

CLOSE_LOOK_INTERVAL_S = 0.25
"""… and while some source has less than ample room, which others may take within a second."""

LOG_INTERVAL_S = 30.0
"""Least seconds between two log lines about changes in the same direction."""

STAGE_BYTES = 256 * 2**20
"""Most that a pool gives up in one step: some 20 ms of a system that takes pages back."""

LEAST_STAGE_BYTES = 16 * 2**20
"""Least that it does where everybody is parked, however little room there is for that before the
pages are given back; half of the room otherwise."""

PARKING_PRICE_S = 3600.0
"""What moving a block to the swap pool is said to cost while RAM is short."""

_UNKNOWN = MoveCosts(0.0, 0.0, 0.0)
"""Costs by which everybody is parked, as if nothing had been measured."""


class ElasticPool:
    """Gives the device pool of a scheduler the size that memory allows. Not thread-safe.

    Args:
        block_bytes: One block of KV cache.
        min_blocks: Smallest pool; no more than ``max_blocks`` counts.
        max_blocks: Largest pool.
        read: Reads the signals.
        most_blocks: Gives the largest size that the pool can grow to at present.
        room_beside: For a pool that is copied to change its size: gives the blocks that fit beside
            it at present. None: it changes its size in place, in the RAM of the swap pool.
        give_back_parked: Returns the memory of these swap blocks to the system.
        settings: The marks; the usual ones if None.

    Attributes:
        goal: Size that is being approached; None if none is.
        shrinks, growths: How often memory has called for a smaller and for a larger pool.

    Raises:
        ConfigError: There are no signals to go by.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        min_blocks: int,
        max_blocks: int,
        read: Callable[[], Sequence[MemorySource]],
        most_blocks: Callable[[], int],
        room_beside: Callable[[], int] | None = None,
        give_back_parked: Callable[[Sequence[int]], None] = lambda blocks: None,
        settings: AdviceSettings | None = None,
    ) -> None:
        if not read():
            raise ConfigError(
                "elastic_memory: this system does not say how much memory is left (there is "
                "neither /proc/meminfo nor a cgroup v2 with a limit)"
            )
        self.goal: int | None = None
        self.shrinks = self.growths = 0
        self._block_bytes = block_bytes
        self._floor_blocks = min_blocks
        self._advisor = PoolAdvisor(
            min_bytes=min(min_blocks, max_blocks) * block_bytes,
            max_bytes=max_blocks * block_bytes,
            settings=settings,
        )
        self._read = read
        self._most_blocks = most_blocks
        self._room_beside = room_beside
        self._give_back_parked = give_back_parked
        self._next_look_s: float | None = None
        self._stage_blocks = 1
        self._measured = _UNKNOWN
        self._is_short = False
        self._last_line: tuple[str, float, int] | None = None  # direction, time, size before

    @property
    def min_blocks(self) -> int:
        """Smallest size."""
        return self._advisor.min_bytes // self._block_bytes

    @property
    def max_blocks(self) -> int:
        """Largest size."""
        return self._advisor.max_bytes // self._block_bytes

    def set_most(self, num_blocks: int) -> None:
        """An operator has given the pool this size: it is the largest one from now on."""
        self.goal = self._last_line = None
        self._advisor.max_bytes = num_blocks * self._block_bytes
        self._advisor.min_bytes = min(self._floor_blocks, num_blocks) * self._block_bytes

    def wait_s(self, now: float) -> float:
        """Seconds until there is something to do."""
        if self.goal is not None or self._next_look_s is None:
            return 0.0
        return max(0.0, self._next_look_s - now)

    def price(self, costs: MoveCosts) -> MoveCosts:
        """What the scheduler is to take for these measured costs."""
        self._measured = costs
        return replace(costs, out_s=PARKING_PRICE_S) if self._is_short else costs

    def follow(self, scheduler: Scheduler) -> None:
        """Look at the memory if it is time, and settle the size for the next step."""
        now = scheduler.clock()
        if self._next_look_s is None or now >= self._next_look_s:
            self._next_look_s = now + LOOK_INTERVAL_S  # also if this one fails
            self._look(now, scheduler)
        if self.goal is not None and not scheduler.is_resizing:
            self._approach(self.goal, scheduler)

    # --- a look ---

    def _look(self, now: float, scheduler: Scheduler) -> None:
        pool, sources = scheduler.device_pool, self._read()
        ample = self._advisor.settings.ample_room
        if any(source.room_bytes < ample * source.limit_bytes for source in sources):
            self._next_look_s = now + CLOSE_LOOK_INTERVAL_S
        pool_bytes = pool.num_blocks * self._block_bytes
        in_place = self._room_beside is None
        resident_bytes = pool.num_touched * self._block_bytes if in_place else pool_bytes
        advice = self._advisor.advise(now, sources, pool_bytes, resident_bytes=resident_bytes)
        returned_bytes = self._follow_shortage(scheduler) if in_place else 0
        if advice.target_bytes < pool_bytes:
            self._shrink(now, scheduler, advice.target_bytes + returned_bytes, advice.reason)
            stage_bytes = STAGE_BYTES
            if scheduler.config.preemption_mode == "swap":  # whoever leaves is parked first
                room = min(source.room_bytes for source in sources)
                stage_bytes = min(STAGE_BYTES, max(LEAST_STAGE_BYTES, room // 2))
            self._stage_blocks = max(1, stage_bytes // self._block_bytes)
        elif advice.target_bytes > pool_bytes:
            self._grow(now, scheduler, advice.target_bytes, advice.reason)

    def _follow_shortage(self, scheduler: Scheduler) -> int:
        """Parking costs RAM: price it while that is short. Until the pool has its largest size
        again, empty what nobody is parked in: it may be the room to grow that is missing.

        Returns:
            Bytes given back.
        """
        was_short, self._is_short = self._is_short, self._advisor.is_short
        if self._is_short is not was_short:
            scheduler.set_costs(self.price(self._measured))
        if not self._is_short and scheduler.device_pool.num_blocks >= self.max_blocks:
            return 0
        blocks = scheduler.swap_pool.reclaim()
        self._give_back_parked(blocks)
        return len(blocks) * self._block_bytes

    def _shrink(self, now: float, scheduler: Scheduler, target_bytes: int, reason: str) -> None:
        size = scheduler.device_pool.num_blocks
        goal = max(self.min_blocks, target_bytes // self._block_bytes)
        if self._room_beside is not None:
            goal = min(goal, self._room_beside())
        if goal < self.min_blocks:
            self._log(now, "stay", size, size, f"{reason}, too little to copy the pool")
            return
        wanted = scheduler.target_blocks if self.goal is None else self.goal
        if goal >= min(size, wanted):  # it is, or waits for a request that may need more
            return
        self.goal = goal
        self.shrinks += 1
        self._log(now, "shrink", size, goal, reason)

    def _grow(self, now: float, scheduler: Scheduler, target_bytes: int, reason: str) -> None:
        size = scheduler.device_pool.num_blocks
        goal = min(-(-target_bytes // self._block_bytes), self.max_blocks, self._most_blocks())
        if goal > size:
            self.goal = goal
            self.growths += 1
            self._log(now, "grow", size, goal, reason)

    def _log(self, now: float, direction: str, size: int, goal: int, reason: str) -> None:
        """A line for the first change in a direction, for the last one, and now and then."""
        is_last = goal != size and goal in (self.min_blocks, self.max_blocks)
        if self._last_line is not None and self._last_line[0] == direction:
            _, last_s, size = self._last_line
            if now - last_s < LOG_INTERVAL_S and not is_last:
                return
        self._last_line = direction, now, goal
        logger.log(
            logging.INFO if direction == "grow" else logging.WARNING,
            "elastic memory: %s; the KV pool %s %s (%.0f MiB)",
            reason,
            "stays at" if direction == "stay" else f"goes from {size} to",
            counted(goal, "block"),
            goal * self._block_bytes / 2**20,
        )

    # --- the way there ---

    def _approach(self, goal: int, scheduler: Scheduler) -> None:
        """Ask for the next stage; who may come to need more keeps it waiting."""
        size = scheduler.device_pool.num_blocks
        if self._room_beside is None and goal < size:
            stage = max(goal, size - self._stage_blocks)
            goal = min(stage, scheduler.target_blocks)  # which the pool may be still above
        if goal != scheduler.target_blocks:
            scheduler.resize(goal)
        if goal == self.goal:
            self.goal = None


def elastic_pool(
    cache: KVCache,
    *,
    min_blocks: int,
    most_blocks: Callable[[], int],
    device_memory: Callable[[], tuple[int, int]] | None = None,
    read: Callable[[], Sequence[MemorySource]] = read_signals,
) -> ElasticPool:
    """An elastic pool over the device pool of ``cache``, whose size now is the largest.

    Args:
        cache: The pools.
        min_blocks: Smallest pool: a full context, so that no request which fitted before is
            refused for want of memory.
        most_blocks: As :class:`ElasticPool`.
        device_memory: Free and total bytes of the GPU that the pool is on; None: it is in RAM.
        read: Reads the signals about RAM.

    Raises:
        ConfigError: As :class:`ElasticPool`.
    """
    max_blocks = cache.num_blocks
    if max_blocks <= min_blocks:
        logger.warning(
            "elastic_memory has nothing to give: the KV pool of %s is not larger than one full "
            "context (%d); a smaller max_model_len would help",
            counted(max_blocks, "block"),
            min_blocks,
        )
    if device_memory is None:
        return ElasticPool(
            block_bytes=cache.block_bytes,
            min_blocks=min_blocks,
            max_blocks=max_blocks,
            read=read,
            most_blocks=most_blocks,
            give_back_parked=cache.give_back_parked,
        )

    def device() -> list[MemorySource]:
        free, total = device_memory()
        return [MemorySource("the GPU", total, free)]

    return ElasticPool(
        block_bytes=cache.block_bytes,
        min_blocks=min_blocks,
        max_blocks=max_blocks,
        read=device,
        most_blocks=most_blocks,
        room_beside=lambda: device_memory()[0] // cache.block_bytes,
    )
