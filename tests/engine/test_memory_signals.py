"""What the kernel says about memory, read from a made-up tree; and the pool's size by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.engine.memory_signals import (
    AdviceSettings,
    MemorySource,
    PoolAdvice,
    PoolAdvisor,
    read_signals,
)
from layby.errors import ConfigError

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def psi(total_us: int) -> str:
    return (
        f"some avg10=1.50 avg60=0.20 avg300=0.00 total={total_us}\n"
        f"full avg10=0.00 avg60=0.00 avg300=0.00 total={total_us // 2}\n"
    )


MACHINE = {
    "proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1024 kB\nMemAvailable: 2097152 kB\nHuge: 0\n",
    "proc/pressure/memory": psi(700),
    "proc/self/cgroup": "1:cpu:/elsewhere\n0::/services/layby\n",
}


def group(path: str, high: str, most: str, current: int, idle: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{path}memory.high": high,
        f"sys/fs/cgroup/{path}memory.max": most,
        f"sys/fs/cgroup/{path}memory.current": f"{current}\n",
        f"sys/fs/cgroup/{path}memory.stat": f"anon 7\ninactive_file {idle}\nactive_file 5\n",
        f"sys/fs/cgroup/{path}memory.pressure": psi(current),
    }


# --- reading ---


def test_the_machine_and_every_limited_group_above_the_process_are_read(tmp_path: Path) -> None:
    """The own group is over memory.high; the one above has memory.max only; the root has none."""
    own = group("services/layby/", "100\n", "max\n", 130, idle=10)
    above = group("services/", "max\n", "1000\n", 400, idle=50)
    write(tmp_path, {**MACHINE, **own, **above, "sys/fs/cgroup/cgroup.procs": "1\n"})
    assert read_signals(tmp_path) == [
        MemorySource("machine", 8 * 2**30, 2 * 2**30, 700),
        MemorySource("/services/layby", 100, -20, 130),
        MemorySource("/services", 1000, 650, 400),
    ]


def test_the_lower_of_high_and_max_is_the_limit_and_inside_a_container_the_root_is_it(
    tmp_path: Path,
) -> None:
    write(tmp_path, {**MACHINE, "proc/self/cgroup": "0::/\n", **group("", "900\n", "800\n", 300)})
    assert read_signals(tmp_path)[1:] == [MemorySource("/", 800, 500, 300)]


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        ({"proc/meminfo": "MemTotal: many kB\n"}, ["/services/layby"]),
        ({"proc/self/cgroup": "4:memory:/v1/only\n"}, ["machine"]),
        ({"proc/self/cgroup": ""}, ["machine"]),
        ({"sys/fs/cgroup/services/layby/memory.current": ""}, ["machine"]),
        ({"sys/fs/cgroup/services/layby/memory.high": "max\n"}, ["machine"]),
    ],
)
def test_what_cannot_be_read_is_left_out(
    tmp_path: Path, broken: dict[str, str], left: list[str]
) -> None:
    write(tmp_path, {**MACHINE, **group("services/layby/", "100\n", "max\n", 50), **broken})
    assert [source.name for source in read_signals(tmp_path)] == left


@pytest.mark.parametrize("text", ["", "some avg10=1.50", "some total=x", "full total=3", "\n\n"])
def test_a_pressure_file_that_says_nothing_leaves_the_room(tmp_path: Path, text: str) -> None:
    """PSI may be missing, switched off (reading it fails) or of a later kernel."""
    write(tmp_path, {**MACHINE, "proc/pressure/memory": text})
    [machine] = read_signals(tmp_path)
    assert machine.room_bytes == 2 * 2**30
    assert machine.stalled_us is None


def test_without_any_sign_there_is_no_source(tmp_path: Path) -> None:
    assert read_signals(tmp_path) == []


def test_this_machine_can_be_read() -> None:
    for source in read_signals():
        assert source.limit_bytes > 0
        assert source.room_bytes <= source.limit_bytes


# --- advice ---


class World:
    """A source of 1,000 MiB of which others use some, and a pool that does as it is told."""

    def __init__(self, *, others: int, pool: int = 400, **settings: Any) -> None:
        self.advisor = PoolAdvisor(
            min_bytes=100 * MIB, max_bytes=500 * MIB, settings=AdviceSettings(**settings)
        )
        self.others, self.pool, self.stalled_s, self.now = others * MIB, pool * MIB, 0.0, 0.0

    @property
    def source(self) -> MemorySource:
        room = 1000 * MIB - self.others - self.pool
        return MemorySource("box", 1000 * MIB, room, int(self.stalled_s * 1e6))

    def second(self, *, stall: float = 0.0) -> PoolAdvice:
        self.now += 1.0
        self.stalled_s += stall
        advice = self.advisor.advise(self.now, [self.source], self.pool)
        self.pool = advice.target_bytes
        return advice

    def seconds(self, count: int, *, stall: float = 0.0) -> list[int]:
        """The pool after each of them, in MiB."""
        return [self.second(stall=stall).target_bytes // MIB for _ in range(count)]


def test_it_shrinks_at_once_by_what_is_missing() -> None:
    """560 + 400 leave 40 of 1,000, below 5%; 60 less leave 100, which is 10%."""
    world = World(others=560)
    advice = world.second()
    assert advice.target_bytes == 340 * MIB
    assert advice.reason == "box has 40 MiB of 1000 MiB left"
    assert world.seconds(100) == [340] * 100  # between the marks nothing moves


def test_it_never_shrinks_below_the_least_pool() -> None:
    world = World(others=1200)
    assert world.seconds(3) == [100, 100, 100]


def test_it_grows_back_slowly_once_it_is_calm() -> None:
    """Nothing for 30 s, then 25 MiB (5% of 500) every ten, as long as 150 MiB stay free."""
    world = World(others=560)
    assert world.second().target_bytes == 340 * MIB
    world.others = 460 * MIB  # room 200
    sizes = world.seconds(60)
    assert sizes[:29] == [340] * 29
    assert sizes[29:39] == [365] * 10
    assert sizes[39:] == [390] * 21  # 25 more would leave 125
    world.others = 0
    assert world.seconds(60)[-1] == 500
    assert world.seconds(60) == [500] * 60


def test_it_does_not_grow_before_it_has_watched_a_while() -> None:
    world = World(others=0, pool=100)
    assert world.seconds(30) == [100] * 30
    assert world.second().target_bytes == 125 * MIB


def test_growing_is_never_followed_by_shrinking_by_itself() -> None:
    world = World(others=300, pool=100)
    sizes = world.seconds(600)
    assert sizes == sorted(sizes)


def test_stalls_shrink_by_a_tenth_every_two_seconds_while_they_last() -> None:
    """400 and 450 of others leave 150, no shortage; but half of the time somebody stalls."""
    world = World(others=450)
    world.second()
    advice = world.second(stall=0.5)
    assert advice.target_bytes == 360 * MIB
    assert advice.reason == "tasks of box stall for memory 50% of the time"
    assert world.seconds(4, stall=0.05 / 0.5) == [360, 324, 324, 291]
    assert world.seconds(4, stall=0.09) == [291] * 4  # less than a tenth of the time


def test_stalls_of_a_source_with_much_room_are_somebody_elses() -> None:
    world = World(others=0)
    assert world.seconds(20, stall=0.9) == [400] * 20


def test_the_tightest_source_decides_and_all_must_have_room_to_grow() -> None:
    advisor = PoolAdvisor(min_bytes=MIB, max_bytes=500 * MIB)
    ample = MemorySource("machine", 10_000 * MIB, 9_000 * MIB)
    tight = MemorySource("/layby", 1000 * MIB, 30 * MIB)
    tighter = MemorySource("/", 1000 * MIB, -20 * MIB)
    advice = advisor.advise(0.0, [ample, tight, tighter], 400 * MIB)
    assert advice == PoolAdvice(280 * MIB, "/ has -20 MiB of 1000 MiB left")
    between = MemorySource("/layby", 1000 * MIB, 160 * MIB)
    assert advisor.advise(100.0, [ample, between], 280 * MIB) == PoolAdvice(280 * MIB)
    assert advisor.advise(200.0, [ample], 280 * MIB).target_bytes == 305 * MIB


def test_without_sources_the_pool_stays() -> None:
    advisor = PoolAdvisor(min_bytes=1, max_bytes=500)
    assert [advisor.advise(float(now), [], 300) for now in range(100)] == [PoolAdvice(300)] * 100


def test_a_pool_that_was_not_touched_is_neither_room_nor_returned() -> None:
    """300 of 400 MiB were never written: room is what they leave, and it is the rest that goes."""
    advisor = PoolAdvisor(min_bytes=10 * MIB, max_bytes=500 * MIB)
    roomy = MemorySource("box", 1000 * MIB, 460 * MIB)
    advisor.advise(0.0, [roomy], 400 * MIB, resident_bytes=100 * MIB)
    later = advisor.advise(60.0, [roomy], 400 * MIB, resident_bytes=100 * MIB)
    assert later.target_bytes == 400 * MIB  # 460 - 300 - 25 is less than 150
    short = MemorySource("box", 1000 * MIB, 40 * MIB)
    advice = advisor.advise(61.0, [short], 400 * MIB, resident_bytes=100 * MIB)
    assert advice.target_bytes == 40 * MIB


@given(
    st.lists(
        st.tuples(st.integers(-500, 2000), st.floats(0, 1), st.floats(1, 30)),
        min_size=1,
        max_size=60,
    )
)
def test_the_target_stays_within_its_bounds_and_shrinking_has_a_reason(
    readings: list[tuple[int, float, float]],
) -> None:
    advisor = PoolAdvisor(min_bytes=100 * MIB, max_bytes=500 * MIB)
    now, stalled_s, pool, calm_since = 0.0, 0.0, 300 * MIB, 0.0
    for room, stall, seconds in readings:
        now, stalled_s = now + seconds, stalled_s + stall * seconds
        source = MemorySource("box", 2000 * MIB, room * MIB, int(stalled_s * 1e6))
        advice = advisor.advise(now, [source], pool)
        assert 100 * MIB <= advice.target_bytes <= 500 * MIB
        if room < 100:
            calm_since = now
        if advice.target_bytes < pool:
            assert room < 100 or (stall >= 0.09 and room < 500)
        if advice.target_bytes > pool:
            assert now - calm_since >= 30
            assert room * MIB - (advice.target_bytes - pool) >= 300 * MIB
        assert bool(advice.reason) == (advice.target_bytes != pool)
        pool = advice.target_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"short_room": 0.2}, r"short_room \(0\.2\), kept_room \(0\.1\) .* must rise"),
        ({"ample_room": 0.1}, "must rise"),
        ({"grow_step": 0}, "grow_step must be above 0 and below 1, got 0"),
        ({"calm_s": float("nan")}, "calm_s must be above 0"),
    ],
)
def test_marks_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdviceSettings(**settings)


@pytest.mark.parametrize(("least", "most"), [(0, 10), (11, 10)])
def test_sizes_that_cannot_be_are_refused(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=rf"min_bytes \({least}\) .* max_bytes \({most}\)"):
        PoolAdvisor(min_bytes=least, max_bytes=most)
