"""Scheduler settings of a simulation: the engine's own, on the machine that a profile tells of."""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict, fields, replace
from typing import Any, Final

from layby.engine.config import GIB, EngineConfig
from layby.errors import ConfigError
from layby.scheduling import SchedulerConfig
from layby.simulate.cost import MoveCost
from layby.simulate.profiles import Profile

_OTHER_NAMES: Final = {"kv_cache_gib", "swap_gib", "swap_disk_gib", "scheduling_policy"}
"""What :class:`EngineConfig` has for fields of :class:`SchedulerConfig` by other names."""

SCHEDULER_OPTIONS: Final = tuple(
    option.name
    for option in fields(EngineConfig)
    if option.name in _OTHER_NAMES | {setting.name for setting in fields(SchedulerConfig)}
)
"""The fields of :class:`EngineConfig` that say something to the scheduler, in its order."""

_POOLS: Final = (("num_blocks", "kv_cache_gib"), ("num_swap_blocks", "swap_gib"))

_ENDLESS_BYTES: Final = 2**62
"""RAM of a simulated host."""


def scheduler_config(profile: Profile, **options: Any) -> SchedulerConfig:
    """What an engine with these options would tell its scheduler, on the profile's machine.

    Args:
        profile: Its sizes take the place of what the engine finds out from model and machine.
            Memory is not limited: a pool is as large as it is said to be.
        options: Any of ``SCHEDULER_OPTIONS``; they mean what they mean to ``layby serve``. None is
            the profile's setting where it has one (pools, block size, limits), as is an option
            that is not named; for ``max_queue`` it is no limit.

    Raises:
        ConfigError: A value, or a combination, cannot work, or there is no such option.
    """
    for name in options:
        if name not in SCHEDULER_OPTIONS:
            near = difflib.get_close_matches(name, SCHEDULER_OPTIONS, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else f"they are {', '.join(SCHEDULER_OPTIONS)}"
            )
            raise ConfigError(f"{name!r} is no scheduler option; {hint}")
    given = {
        name: value for name, value in options.items() if value is not None or name == "max_queue"
    }
    block_size = given.get("block_size", profile.block_size)
    # A size that cannot be is left to the engine's checks.
    if isinstance(block_size, int) and block_size > 0:
        profile = with_block_size(profile, block_size)
    if "swap_disk_gib" in given:
        if profile.cost.demote is None or profile.cost.promote is None:
            raise ConfigError(
                f"swap_disk_gib is given, but the profile {profile.name} does not tell how fast a "
                "disk is: it was measured without swap_dir"
            )
        given["swap_dir"] = os.curdir  # any will do: no file is made
    engine = EngineConfig.from_options(**_profile_options(profile, given) | given)
    return engine.resolve(
        context_length=profile.scheduler.max_model_len,
        block_bytes=profile.block_bytes,
        host_bytes=_ENDLESS_BYTES,
    )


def _profile_options(profile: Profile, given: dict[str, Any]) -> dict[str, Any]:
    """What the profile sets, but for the pools whose size is given in either unit."""
    own: dict[str, Any] = asdict(profile.scheduler)
    own["block_size"] = profile.block_size
    # In bytes, since the engine makes no swap pool of its own accord where nothing would use it.
    own["swap_gib"] = own.pop("num_swap_blocks") * profile.block_bytes / GIB
    for names in _POOLS:
        if any(name in given for name in names):
            for name in names:
                own.pop(name, None)
    return own


def with_block_size(profile: Profile, block_size: int) -> Profile:
    """The same machine with KV blocks of another size.

    Blocks weigh and cost to move what their tokens do, and pools keep their size in bytes. That
    attention may be faster or slower with them is not known.
    """
    if block_size == profile.block_size:
        return profile
    ratio, sizes = block_size / profile.block_size, profile.scheduler

    def transfer(cost: MoveCost | None) -> MoveCost | None:
        return None if cost is None else cost.scaled(ratio)

    return replace(
        profile,
        block_size=block_size,
        block_bytes=max(1, round(profile.block_bytes * ratio)),
        scheduler=replace(
            sizes,
            num_blocks=max(1, int(sizes.num_blocks / ratio)),
            num_swap_blocks=int(sizes.num_swap_blocks / ratio),
        ),
        cost=replace(
            profile.cost,
            swap_out=profile.cost.swap_out.scaled(ratio),
            swap_in=profile.cost.swap_in.scaled(ratio),
            copy=profile.cost.copy.scaled(ratio),
            demote=transfer(profile.cost.demote),
            promote=transfer(profile.cost.promote),
        ),
    )
