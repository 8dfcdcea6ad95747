"""What the kernel says about memory, and how large the KV pool should be in view of it.

Two parts that know nothing of one another's inner life: :func:`read_signals` looks at the machine
and at this process's cgroups, and :class:`PoolAdvisor` turns what was read into a size (pure,
driven by the times it is given). ``elastic.py`` asks both and makes it so.

A *source* is the machine, a cgroup that has a limit, or a GPU. Of each, two things count: the room
that is left, and how much of the time somebody stood still for want of memory (PSI, "some"). The
rules:

========  ==========================================================================================
shrink    At once, where a source has less room than 5% of its limit: by what is missing to 10%. Or
          where tasks of a source that has less room than 25% stall for 10% of the time: by a tenth
          of the pool, every two seconds while it lasts.
grow      By 5% of the largest pool, every ten seconds, where every source keeps 15% of its limit
          afterwards, and no reason to shrink was seen for 30 s.
stay      Otherwise.
========  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from layby.engine.memory import cgroup_directories
from layby.errors import ConfigError

STALL_WINDOW_S = 1.0
"""Seconds over which stalls are looked at, at least: a shorter one says nothing about a second."""


# --- what the kernel says ---


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Somebody who can run short of memory, at one moment.

    Attributes:
        name: ``machine``, the cgroup's path, or the GPU's name.
        limit_bytes: What it has. Of a cgroup, the lower of ``memory.high`` and ``memory.max``.
        room_bytes: What is left of that; below 0 beyond ``memory.high``. File pages that nobody
            used lately count as room: the kernel gives them up as soon as they are wanted.
        stalled_us: Microseconds, since it exists, in which a task stood still for want of memory;
            None where the kernel does not count them.
    """

    name: str
    limit_bytes: int
    room_bytes: int
    stalled_us: int | None = None


def read_signals(root: Path = Path("/")) -> list[MemorySource]:
    """The machine, and this process's cgroups (v2) that have a limit, innermost first.

    What cannot be read is left out: the list is empty where the system says nothing at all.

    Args:
        root: Where ``proc`` and ``sys`` are; another directory in tests.
    """
    mount = root / "sys/fs/cgroup"
    sources = [_machine(root)]
    sources += [_cgroup(directory, mount) for directory in cgroup_directories(root)]
    return [source for source in sources if source is not None]


def _machine(root: Path) -> MemorySource | None:
    """Free and total memory of the machine, and the stalls of all its tasks."""
    try:
        known = _numbers(root / "proc/meminfo")
        limit, room = known["MemTotal:"] * 1024, known["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        return None
    return MemorySource("machine", limit, room, _stalled_us(root / "proc/pressure/memory"))


def _cgroup(directory: Path, mount: Path) -> MemorySource | None:
    """A cgroup, if it has a limit; the root of the tree has no such files."""
    limits = [_limit(directory / name) for name in ("memory.high", "memory.max")]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        return None
    try:
        used = int((directory / "memory.current").read_text())
        idle = _numbers(directory / "memory.stat").get("inactive_file", 0)
    except (OSError, ValueError):
        return None
    name = "/" if directory == mount else f"/{directory.relative_to(mount)}"
    room = limit - max(0, used - idle)
    return MemorySource(name, limit, room, _stalled_us(directory / "memory.pressure"))


def _limit(file: Path) -> int | None:
    try:
        return int(file.read_text())  # "max" is no number, and no limit
    except (OSError, ValueError):
        return None


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number, and perhaps a unit."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def _stalled_us(file: Path) -> int | None:
    """``total`` of the line ``some avg10=0.00 avg60=0.00 avg300=0.00 total=0``."""
    try:
        for line in file.read_text().splitlines():
            kind, *pairs = line.split()
            if kind == "some":
                return int(dict(pair.split("=") for pair in pairs)["total"])
    except (OSError, ValueError, KeyError):  # PSI may be compiled in and switched off
        pass
    return None


# --- what follows from it ---


@dataclass(frozen=True, slots=True)
class AdviceSettings:
    """The marks. Shares of room are shares of a source's limit.

    Attributes:
        short_room: Less room than that is short …
        kept_room: … and so much is to be left after shrinking.
        ample_room: So much is to be left after growing; more than ``kept_room``, so that growing
            is never followed by shrinking unless somebody else took the memory.
        stall_share: Share of the time for which tasks stall that is too much …
        stall_room: … unless there is more room than this: then they wait for something else.
        stall_shrink: Share of the pool that is given up against stalls …
        stall_wait_s: … every so many seconds, because it takes that long to see what it helped.
        grow_step: Share of the largest pool by which it grows …
        grow_wait_s: … every so many seconds.
        calm_s: Seconds without a reason to shrink before it grows.

    Raises:
        ConfigError: A value is out of range, or two contradict each other.
    """

    short_room: float = 0.05
    kept_room: float = 0.10
    ample_room: float = 0.15
    stall_share: float = 0.10
    stall_room: float = 0.25
    stall_shrink: float = 0.10
    stall_wait_s: float = 2.0
    grow_step: float = 0.05
    grow_wait_s: float = 10.0
    calm_s: float = 30.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            most = math.inf if name.endswith("_s") else 1.0
            if not 0 < getattr(self, name) < most:
                raise ConfigError(
                    f"{name} must be above 0 and below {most:g}, got {getattr(self, name)!r}"
                )
        if not self.short_room < self.kept_room < self.ample_room:
            raise ConfigError(
                f"short_room ({self.short_room:g}), kept_room ({self.kept_room:g}) and ample_room "
                f"({self.ample_room:g}) must rise"
            )


@dataclass(frozen=True, slots=True)
class PoolAdvice:
    """How large the KV pool should be.

    Attributes:
        target_bytes: The size; that of the pool now where it may stay.
        reason: Why, for the log; empty where it may stay.
    """

    target_bytes: int
    reason: str = ""


class PoolAdvisor:
    """Says how large the KV pool should be: shrinks it quickly and grows it slowly.

    Args:
        min_bytes: Smallest pool, enough for the largest request.
        max_bytes: Largest pool.
        settings: The marks; the usual ones if None.

    Attributes:
        is_short: There was a reason to shrink, and since then ``calm_s`` seconds without one and
            ``ample_room`` everywhere have not come together.

    Raises:
        ConfigError: There is no size between the two.
    """

    def __init__(
        self, *, min_bytes: int, max_bytes: int, settings: AdviceSettings | None = None
    ) -> None:
        if not 0 < min_bytes <= max_bytes:
            raise ConfigError(
                f"min_bytes ({min_bytes}) must be above 0 and at most max_bytes ({max_bytes})"
            )
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.settings = settings or AdviceSettings()
        self.is_short = False
        self._stalled_us: dict[str, tuple[float, int]] = {}  # source → last reading
        self._last_short_s: float | None = None  # None before the first reading
        self._last_stall_shrink_s = self._last_growth_s = -math.inf

    def advise(
        self,
        now: float,
        sources: Sequence[MemorySource],
        pool_bytes: int,
        *,
        resident_bytes: int | None = None,
    ) -> PoolAdvice:
        """Look at one reading.

        Args:
            now: Its time in seconds; never backwards.
            sources: As from ``read_signals``.
            pool_bytes: Size of the pool now. It need not have followed the last advice yet.
            resident_bytes: What of it the system has given; None: all. A pool that was never
                written to takes no memory yet: that can be returned by nobody, and may be wanted
                at any time.
        """
        resident_bytes = pool_bytes if resident_bytes is None else min(resident_bytes, pool_bytes)
        if self._last_short_s is None:
            self._last_short_s = now
        stalling = self._stalling(now, sources)
        short = [one for one in sources if one.room_bytes < self._share("short_room", one)]
        if not (stalling or short):
            return self._grow(now, sources, pool_bytes, resident_bytes)
        self._last_short_s, self.is_short = now, True
        advices = [self._shrink_for_room(one, resident_bytes) for one in short]
        if stalling and now - self._last_stall_shrink_s >= self.settings.stall_wait_s:
            self._last_stall_shrink_s = now
            advices.append(self._shrink_for_stalls(stalling, resident_bytes))
        lowest = min(advices, key=lambda advice: advice.target_bytes, default=None)
        target = pool_bytes if lowest is None else max(self.min_bytes, lowest.target_bytes)
        if lowest is None or target >= pool_bytes:
            return PoolAdvice(pool_bytes)  # the last advice has not shown its effect, or no less
        return PoolAdvice(target, lowest.reason)

    def _share(self, mark: str, source: MemorySource) -> float:
        share: float = getattr(self.settings, mark)
        return share * source.limit_bytes

    def _stalling(self, now: float, sources: Sequence[MemorySource]) -> dict[str, float]:
        """Sources whose tasks stall too much, and the share of the time that they do."""
        stalling = {}
        for source in sources:
            if source.stalled_us is None:
                continue
            since_s, before_us = self._stalled_us.setdefault(source.name, (now, source.stalled_us))
            if now - since_s < STALL_WINDOW_S:
                continue
            self._stalled_us[source.name] = now, source.stalled_us
            share = (source.stalled_us - before_us) / 1e6 / (now - since_s)
            if share >= self.settings.stall_share and source.room_bytes < self._share(
                "stall_room", source
            ):
                stalling[source.name] = share
        return stalling

    def _shrink_for_room(self, source: MemorySource, resident_bytes: int) -> PoolAdvice:
        missing = math.ceil(self._share("kept_room", source)) - source.room_bytes
        return PoolAdvice(
            resident_bytes - missing,
            f"{source.name} has {_mib(source.room_bytes)} of {_mib(source.limit_bytes)} left",
        )

    def _shrink_for_stalls(self, stalling: dict[str, float], resident_bytes: int) -> PoolAdvice:
        name, share = max(stalling.items(), key=lambda item: item[1])
        return PoolAdvice(
            int(resident_bytes * (1 - self.settings.stall_shrink)),
            f"tasks of {name} stall for memory {share:.0%} of the time",
        )

    def _grow(
        self, now: float, sources: Sequence[MemorySource], pool_bytes: int, resident_bytes: int
    ) -> PoolAdvice:
        settings = self.settings
        assert self._last_short_s is not None  # set by the first reading
        if now - self._last_short_s < settings.calm_s:
            return PoolAdvice(pool_bytes)
        if all(one.room_bytes >= self._share("ample_room", one) for one in sources):
            self.is_short = False
        step = min(math.ceil(settings.grow_step * self.max_bytes), self.max_bytes - pool_bytes)
        owed = pool_bytes - resident_bytes
        if (
            step <= 0
            or not sources
            or now - self._last_growth_s < settings.grow_wait_s
            or any(one.room_bytes - owed - step < self._share("ample_room", one) for one in sources)
        ):
            return PoolAdvice(pool_bytes)
        self._last_growth_s = now
        return PoolAdvice(pool_bytes + step, "there is room again")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
