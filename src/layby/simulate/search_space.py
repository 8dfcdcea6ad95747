"""Which settings a search tries on a machine, within what is possible there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from layby.engine.config import DEFAULT_SWAP_GIB, GIB, EngineConfig
from layby.errors import ConfigError
from layby.scheduling import SchedulerConfig
from layby.scheduling.policy import POLICIES
from layby.simulate.profiles import Profile
from layby.simulate.settings import scheduler_config, with_block_size

Value = int | float | str | None
"""Of one setting; None: it is off, as the largest number would have it."""

Settings = Mapping[str, Value]
"""Options of ``layby serve`` by name, and what each is set to."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that is searched.

    Attributes:
        option: Its name as an option of ``layby serve``.
        rungs: The values to try, given the default, which is always among them.
        aliases: Options that set the same thing.
        field: Its name in :class:`SchedulerConfig`, if it is another.
        on_request: Only searched when asked for.
        of_classes: Only searched where there are requests of several classes: elsewhere it changes
            nothing, or nothing that was asked for.
        most: The largest number that it may be.
    """

    option: str
    rungs: Callable[[Value], Sequence[Value]]
    aliases: tuple[str, ...] = ()
    field: str = ""
    on_request: bool = False
    of_classes: bool = False
    most: float = math.inf

    @property
    def names(self) -> tuple[str, ...]:
        """All options that set it."""
        return (self.option, *self.aliases)


def _around(low: float, high: float) -> Callable[[Value], list[Value]]:
    """Whole numbers from ``low`` to ``high`` times the default, four to an octave."""

    def rungs(default: Value) -> list[Value]:
        assert isinstance(default, int)
        first, last = max(1, default * low), default * high
        octaves = range(max(0, int(math.log2(first)) - 1), int(math.log2(last)) + 1)
        steps = {2**octave * quarter // 4 for octave in octaves for quarter in (4, 5, 6, 7)}
        return [step for step in sorted(steps) if first <= step <= last]

    return rungs


def _parts(*parts: float) -> Callable[[Value], list[Value]]:
    """So many parts of the default."""

    def rungs(default: Value) -> list[Value]:
        assert isinstance(default, int | float)
        return [float(f"{default * part:.3g}") for part in parts]

    return rungs


def _among(*values: Value) -> Callable[[Value], list[Value]]:
    return lambda default: list(values)


KNOBS: Final = (
    Knob("max_num_seqs", _around(1 / 16, 8)),
    Knob("max_num_batched_tokens", _around(1 / 16, 8)),
    Knob("headroom", _among(0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)),
    Knob("preemption_mode", _among("auto", "recompute")),
    # No more than there is: RAM is not what a search can find.
    Knob("swap_gib", _parts(0, 1 / 8, 1 / 4, 1 / 2), ("num_swap_blocks",), "num_swap_blocks"),
    Knob("urgent_window", _among(0.0, 5.0, 15.0, 30.0, 60.0, 120.0), of_classes=True),
    Knob("background_tokens", _among(0, 16, 32, 48, 96, 192, 384), of_classes=True),
    Knob("preemption_threshold", _among(0.7, 0.8, 0.9, 0.95, 1.0), of_classes=True, most=1.0),
    Knob("priority_aging", _among(5.0, 10.0, 30.0, 60.0, 120.0, 300.0, None), of_classes=True),
    Knob("demote_after_tokens", _among(64, 128, 256, 512, 1024, None), of_classes=True),
    Knob("scheduling_policy", _among(*POLICIES), field="policy", on_request=True),
)
"""Every setting that is searched: a further one is a further line."""

_MOST: Final = {knob.option: knob.most for knob in KNOBS}

HELD: Final = (
    "num_blocks", "block_size", "max_model_len", "enable_prefix_caching", "max_queue",
    "num_disk_blocks", "watermark",
)  # fmt: skip
"""Fields of :class:`SchedulerConfig` that are not searched: what the machine has, what is promised
to callers, and what is never better off. The watermark keeps the kind of room that headroom keeps,
and the larger of the two counts: searching both would be searching one of them twice."""


class SearchSpace:
    """Which settings are tried on a machine, and what each combination tells the scheduler.

    The queue has no limit unless one is given: who was refused would be missing in the latencies.

    Args:
        profile: The machine, and where settings begin.
        fixed: Options that the user has given; they are not searched.
        most_samples: The largest ``n`` of a request to be served.
        several_classes: There are requests of more than one class to be served.
        search_policy: Search the scheduling policy as well.

    Raises:
        ConfigError: The given options cannot work.

    Attributes:
        base: The scheduler's settings with all defaults.
        defaults: Of each searched option.
        rungs: The values of each that are tried, in order.
    """

    def __init__(
        self,
        profile: Profile,
        fixed: Mapping[str, Any] | None = None,
        *,
        most_samples: int = 1,
        several_classes: bool = False,
        search_policy: bool = False,
    ) -> None:
        self.fixed = dict(fixed or {})
        self._options = {"max_queue": None} | self.fixed
        self.base = scheduler_config(profile, **self._options)
        self.profile = with_block_size(profile, self.base.block_size)
        self.defaults: dict[str, Value] = {}
        self.rungs: dict[str, tuple[Value, ...]] = {}
        for knob in KNOBS:
            if (
                any(name in self.fixed for name in knob.names)
                or (knob.on_request and not search_policy)
                or (knob.of_classes and not several_classes)
            ):
                continue
            default = self._default(knob)
            rungs = self._allowed(knob.option, [*knob.rungs(default), default], most_samples)
            if len(rungs) > 1:
                self.defaults[knob.option] = default
                self.rungs[knob.option] = rungs
        if not self.rungs:
            raise ConfigError(
                "every setting that could be searched is given: "
                f"{', '.join(f'{name}={value}' for name, value in self.fixed.items())}"
            )

    def _default(self, knob: Knob) -> Value:
        value: Value = getattr(self.base, knob.field or knob.option)
        if knob.option == "swap_gib":
            assert isinstance(value, int)  # it is in blocks
            return value * self.profile.block_bytes / GIB
        return value

    def _allowed(self, option: str, rungs: Sequence[Value], most_samples: int) -> tuple[Value, ...]:
        """Each value once: numbers rising, within what others that are given allow."""
        if isinstance(rungs[0], str):
            return tuple(dict.fromkeys(rungs))
        low, high = 0.0, math.inf
        if option == "max_num_seqs":
            low, high = most_samples, max(self.base.num_blocks, self.base.max_num_seqs)
            if "max_num_batched_tokens" in self.fixed:
                high = min(high, self.base.max_num_batched_tokens)
        if option == "max_num_batched_tokens" and "max_num_seqs" in self.fixed:
            low = self.base.max_num_seqs
        fitting = {value for value in rungs if value is None or low <= float(value) <= high}
        return tuple(sorted(fitting, key=lambda value: math.inf if value is None else float(value)))

    def tidy(self, settings: Settings) -> dict[str, Value]:
        """The same where that can work: a step computes a token for every sequence at least."""
        tidied = {name: settings.get(name, default) for name, default in self.defaults.items()}
        seqs = tidied.get("max_num_seqs", self.base.max_num_seqs)
        tokens = tidied.get("max_num_batched_tokens", self.base.max_num_batched_tokens)
        assert isinstance(seqs, int)
        assert isinstance(tokens, int)
        if tokens < seqs:
            if "max_num_batched_tokens" in tidied:
                tidied["max_num_batched_tokens"] = seqs
            else:
                tidied["max_num_seqs"] = tokens
        return tidied

    def config(self, settings: Settings) -> SchedulerConfig:
        """What the scheduler is told.

        Raises:
            ConfigError: The settings cannot work.
        """
        changed = self.changed(self.tidy(settings))
        options = self._options | changed
        if _never_parks(options):
            options = {name: value for name, value in options.items() if name != "swap_gib"}
        return scheduler_config(self.profile, **options)

    def changed(self, settings: Settings) -> dict[str, Value]:
        """Those that are not at their defaults."""
        return {name: value for name, value in settings.items() if value != self.defaults[name]}

    def neighbours(self, settings: Settings) -> list[tuple[str, dict[str, Value]]]:
        """Each number a quarter up, and a fifth down, all else as it is."""
        found = []
        for name, value in settings.items():
            if not isinstance(value, int | float):
                continue
            if name == "swap_gib" and _never_parks(settings):
                continue
            if isinstance(value, int):
                moved: list[Value] = [max(1, min(value - 1, round(value * 0.8)))]
                moved.append(max(value + 1, round(value * 1.25)))
            else:
                moved = [value * 0.8, min(value * 1.25 if value else 0.25, _MOST[name])]
            for other in dict.fromkeys(moved):
                tidied = self.tidy({**settings, name: other})
                if tidied != settings and tidied[name] == other:
                    found.append((name, tidied))
        return found

    def serve_flags(self, settings: Settings) -> list[tuple[str, str]]:
        """What makes ``layby serve`` do the same: all options that it would set otherwise itself.

        Returns:
            Flags and their values; a flag without a value has an empty one.
        """
        own = {option.name: option.default for option in fields(EngineConfig)}
        own["swap_gib"] = DEFAULT_SWAP_GIB
        chosen = dict(self.fixed)
        for knob in KNOBS:
            if not any(name in chosen for name in knob.names):
                chosen[knob.option] = settings.get(knob.option, self._default(knob))
        if _never_parks(chosen):  # the engine makes no swap pool then
            chosen.pop("swap_gib", None)
        flags = []
        for name, value in chosen.items():
            if written(value) == written(own[name]):
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                flags.append((flag if value else f"--no-{flag[2:]}", ""))
            else:
                flags.append((flag, written(value)))
        if "swap_disk_gib" in chosen:
            flags.append(("--swap-dir", "DIR"))
        return flags


def written(value: object) -> str:
    """A setting as it stands on a command line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def _never_parks(options: Mapping[str, Any]) -> bool:
    return options.get("preemption_mode") == "recompute" or options.get("scheduling_policy") in (
        "recompute-only",
        "reserve",
    )
