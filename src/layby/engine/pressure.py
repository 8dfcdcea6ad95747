"""How hard memory is pressed, from queue lengths over time; and whose new work is then refused.

One gauge watches the queues. It looks at them ``LOOKS`` times per window and says one of three
things. All marks are fields of :class:`PressureSettings`; in words:

=========  =========================================================================================
ok         Memory suffices, or what is parked and waits grows no more.
rising     Memory is short (somebody is parked, or the device pool is 90% full) and the swapped
           queue, or all who wait and are parked together, grow; or the swap pool is 90% full.
saturated  Memory is short, the backlog is deep (at least as many wait and are parked as run, and
           at the present drain rate it takes 10 s), and more comes than goes: the number of live
           requests rose from each quarter of the window to the next. With a swap pool that is 90%
           full, from one half to the other is enough.
=========  =========================================================================================

That the *live* requests must grow tells an overload from a full house: a fixed crowd of clients,
each of whom sends its next request when it has its answer, may fill both pools for hours without
ever being one; nor is a single burst, which is queued and then served.

What grows counts as growth if it comes to two requests per window and a tenth of the drain rate.
A state is entered at once and left only when the conditions at the lower marks (three quarters of
the usages, half of the rest) have failed for a quarter of the window; saturation does not need
growth to last, because refusing work is what ends the growth. An idle engine is ok at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from layby.errors import ConfigError, QueueFullError, counted

LOOKS = 32
"""Looks at the queues that make a window; a multiple of 4."""

QUARTER = LOOKS // 4

MAX_RETRY_AFTER_S = 300.0
"""Nobody is told to wait longer than that: by then all is different."""


class PressureState(StrEnum):
    """How hard memory is pressed."""

    OK = "ok"
    RISING = "rising"
    SATURATED = "saturated"


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """The marks.

    Attributes:
        window_s: Seconds over which growth is judged; longer where steps take longer than a look
            every ``window_s / LOOKS``.
        drain_window_s: Seconds over which the drain rate is taken.
        full: Share of a pool from which it counts as full.
        deep_wait_s: Seconds that a deep backlog takes to drain.
        min_growth: Requests by which a queue must grow within a window …
        min_growth_share: … and share of the drain rate at which it must.
        usage_ease: What ``full`` is multiplied with in a state that is to be left.
        ease: The same for the other marks.

    Raises:
        ConfigError: A value is out of range.
    """

    window_s: float = 15.0
    drain_window_s: float = 60.0
    full: float = 0.9
    deep_wait_s: float = 10.0
    min_growth: float = 2.0
    min_growth_share: float = 0.1
    usage_ease: float = 0.75
    ease: float = 0.5

    def __post_init__(self) -> None:
        for name in ("window_s", "drain_window_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if self.drain_window_s < self.window_s:
            raise ConfigError(
                f"drain_window_s ({self.drain_window_s:g}) must be at least window_s "
                f"({self.window_s:g})"
            )
        for name in ("full", "usage_ease", "ease"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1")
        for name in ("deep_wait_s", "min_growth", "min_growth_share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """What the gauge looks at.

    Attributes:
        running, waiting, swapped: Requests in each queue.
        finished: Requests that ended by themselves, since the engine was made.
        kv_usage, swap_usage: Held share of each pool, 0 to 1; 0 of a pool without blocks.
    """

    running: int
    waiting: int
    swapped: int
    finished: int
    kv_usage: float
    swap_usage: float

    @property
    def backlog(self) -> int:
        """Requests that are not running."""
        return self.waiting + self.swapped

    @property
    def live(self) -> int:
        """All requests that have not ended."""
        return self.running + self.waiting + self.swapped


class PressureGauge:
    """Watches the queues and judges. Has no clock: every look brings its time.

    Attributes:
        settings: The marks.
        state: The judgement.
        swapped_queue_growth: Requests per second by which the swapped queue grows (below 0:
            shrinks): least-squares slope over the window; 0 until a quarter of it has passed.
        drain_rate: Requests that finish per second.
    """

    def __init__(self, settings: PressureSettings | None = None) -> None:
        self.settings = settings or PressureSettings()
        self.state = PressureState.OK
        self.swapped_queue_growth = 0.0
        self.drain_rate = 0.0
        self._interval_s = self.settings.window_s / LOOKS
        self._looks: deque[tuple[float, Load]] = deque(maxlen=LOOKS)
        self._finished: deque[tuple[float, int]] = deque()
        self._calm_looks = 0  # looks on end at which nothing held the state

    def observe(self, now: float, load: Load) -> None:
        """See the queues at ``now`` seconds. To be called after every change, cheap between looks.

        Times must not go backwards.
        """
        if load.live == 0:
            if self._looks:
                self._reset()
            return
        if self._looks and now - self._looks[-1][0] < self._interval_s:
            return
        self._looks.append((now, load))
        self._measure_drain(now, load.finished)
        self.swapped_queue_growth = self._slope([load.swapped for _, load in self._looks])
        self._judge(load)

    @property
    def next_look_s(self) -> float:
        """Before this time ``observe`` looks at nothing, unless the engine becomes idle; it may be
        a hair too early. Minus infinity if the next look is the first."""
        if not self._looks:
            return -math.inf
        return math.nextafter(self._looks[-1][0] + self._interval_s, -math.inf)

    def retry_after_s(self, backlog: int) -> float:
        """Seconds after which so many requests will have drained; 1 to ``MAX_RETRY_AFTER_S``.

        While nothing has finished yet, the length of the drain window.
        """
        if self.drain_rate == 0:
            return min(self.settings.drain_window_s, MAX_RETRY_AFTER_S)
        return min(max(1.0, backlog / self.drain_rate), MAX_RETRY_AFTER_S)

    def _reset(self) -> None:
        self.state = PressureState.OK
        self.swapped_queue_growth = self.drain_rate = 0.0
        self._calm_looks = 0
        self._looks.clear()
        self._finished.clear()

    # --- what is measured ---

    def _measure_drain(self, now: float, finished: int) -> None:
        history = self._finished
        history.append((now, finished))
        while len(history) > 2 and now - history[1][0] >= self.settings.drain_window_s:
            history.popleft()
        (since, before), span_s = history[0], now - history[0][0]
        self.drain_rate = max(0, finished - before) / span_s if now > since else 0.0

    @property
    def _span_s(self) -> float:
        return self._looks[-1][0] - self._looks[0][0]

    @property
    def _growth_mark(self) -> float:
        """Requests per second that count as growth."""
        window_s = max(self.settings.window_s, self._span_s)
        by_drain = self.settings.min_growth_share * self.drain_rate
        return max(self.settings.min_growth / window_s, by_drain)

    def _slope(self, counts: Sequence[int]) -> float:
        """Least-squares slope of what was counted at each look, per second."""
        if len(counts) <= QUARTER:
            return 0.0
        times = [at for at, _ in self._looks]
        mean_time, mean_count = sum(times) / len(times), sum(counts) / len(counts)
        spread = sum((at - mean_time) ** 2 for at in times)
        common = sum(
            (at - mean_time) * (count - mean_count) for at, count in zip(times, counts, strict=True)
        )
        return common / spread

    def _keeps_growing(self, *, parts: int) -> bool:
        """Whether the live requests rose from each part of a whole window to the next.

        A trend, not a step: no rise that is over within a quarter of the window can lift all four
        quarters above one another.
        """
        if len(self._looks) < LOOKS:
            return False
        live, size = [load.live for _, load in self._looks], LOOKS // parts
        means = [sum(live[first : first + size]) / size for first in range(0, LOOKS, size)]
        least = self._growth_mark * self._span_s / parts
        return all(later - before >= least for before, later in pairwise(means))

    # --- what is made of it ---

    def _judge(self, load: Load) -> None:
        if self._saturates(load):
            self._calm_looks, self.state = 0, PressureState.SATURATED
        elif self.state is PressureState.OK:
            if self._rises(load, usage_ease=1.0, ease=1.0):
                self.state = PressureState.RISING
        elif self._stays(load):
            self._calm_looks = 0
        else:
            self._calm_looks += 1
            if self._calm_looks >= QUARTER:
                self._calm_looks = 0
                rises = self.state is PressureState.SATURATED and self._rises(
                    load, usage_ease=1.0, ease=1.0
                )
                self.state = PressureState.RISING if rises else PressureState.OK

    def _stays(self, load: Load) -> bool:
        """Whether something still holds the state, at the lower marks."""
        settings = self.settings
        if self.state is PressureState.SATURATED:
            return self._is_short(load, settings.usage_ease) and self._is_deep(load, settings.ease)
        return self._rises(load, usage_ease=settings.usage_ease, ease=settings.ease)

    def _saturates(self, load: Load) -> bool:
        if not (self._is_short(load, 1.0) and self._is_deep(load, 1.0)):
            return False
        return self._keeps_growing(parts=2 if self._swap_is_full(load, 1.0) else 4)

    def _rises(self, load: Load, *, usage_ease: float, ease: float) -> bool:
        if not self._is_short(load, usage_ease):
            return False
        mark = ease * self._growth_mark
        return (
            self._swap_is_full(load, usage_ease)
            or self.swapped_queue_growth >= mark
            or self._slope([load.backlog for _, load in self._looks]) >= mark
        )

    def _is_short(self, load: Load, usage_ease: float) -> bool:
        """Whether there is less device memory than could be used."""
        return load.swapped > 0 or load.kv_usage >= usage_ease * self.settings.full

    def _swap_is_full(self, load: Load, usage_ease: float) -> bool:
        return load.swapped > 0 and load.swap_usage >= usage_ease * self.settings.full

    def _is_deep(self, load: Load, ease: float) -> bool:
        """Whether the backlog is worth a whole turn of those who run, and takes its time."""
        wait_s = load.backlog / self.drain_rate if self.drain_rate else math.inf
        return (
            load.backlog >= max(1.0, ease * load.running)
            and wait_s >= ease * self.settings.deep_wait_s
        )


class LoadShedding:
    """Refuses new work of the lowest class while the gauge says ``saturated``.

    The lowest class is the largest priority number among the requests that live, or that were
    refused within the last drain window: those who are turned away come again, so a class does not
    become the lowest only because the one below it was shut out. With one class, that is the one.

    Attributes:
        num_refused: Requests that were refused.
    """

    def __init__(self, gauge: PressureGauge) -> None:
        self._gauge = gauge
        self._refused: tuple[int, float] | None = None  # the lowest class of them, and when
        self.num_refused = 0

    def check(self, now: float, priority: int, live: Iterable[int], backlog: int) -> None:
        """Refuse a newcomer, or not.

        Args:
            now: Seconds, on the gauge's clock.
            priority: The newcomer's.
            live: Priorities of all requests that have been accepted and not ended.
            backlog: Those of them that are not running.

        Raises:
            QueueFullError: It is of the lowest class, and the engine is saturated.
        """
        if self._gauge.state is not PressureState.SATURATED:
            return
        lowest = max(live, default=priority)
        if self._refused is not None:
            refused, since = self._refused
            if now - since < self._gauge.settings.drain_window_s:
                lowest = max(lowest, refused)
        if priority < lowest:
            return
        self._refused = (priority, now)
        self.num_refused += 1
        retry_after_s = self._gauge.retry_after_s(backlog)
        raise QueueFullError(
            f"the engine is saturated: {counted(backlog, 'request')} waiting or parked, "
            f"{self._gauge.drain_rate:.2g} finish per second, and new work of the lowest class "
            f"(priority {priority}) is refused; come again in {math.ceil(retry_after_s)} s",
            retry_after_s=retry_after_s,
        )
