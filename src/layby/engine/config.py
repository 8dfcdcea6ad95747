"""Settings of an engine, and how every "auto" among them is settled."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass, field, fields
from typing import Any

from layby.engine.recording import KEPT_FILES
from layby.errors import ConfigError, counted, shown
from layby.scheduling.config import PREEMPTION_MODES, SchedulerConfig
from layby.scheduling.policy import POLICIES

logger = logging.getLogger("layby.engine")

GIB = 2**30

HOST_POOL_SHARE = 0.4
"""Share of the available RAM that the device pool takes by default on a CPU machine."""

CUDA_POOL_SHARE = 0.8
"""Share of the free GPU memory that it takes there, after the weights are loaded."""

DEFAULT_SWAP_GIB = 4.0
"""Size of the swap pool where none is asked for and the RAM allows it."""

DEFAULT_SWAP_DISK_GIB = 16.0
"""Size of the swap file where there is to be one."""

SWAP_POOL_SHARE = 0.5
"""Most that a swap pool sized in GiB takes of the RAM that the device pool leaves."""

DEFAULT_KEEP_S = 86_400.0
"""How long a server with a state directory keeps results by default, in seconds."""


def _option(
    default: Any, help_text: str, *, unit: str | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """A field whose metadata (``help``, ``unit``, ``choices``) makes the command-line flag."""
    return field(default=default, metadata={"help": help_text, "unit": unit, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that makes an engine. Each name, with dashes, is a command-line flag.

    The meaning of each is its ``help`` in ``dataclasses.fields(EngineConfig)``.

    Raises:
        ConfigError: A value, or a combination, cannot work.
    """

    model: str = _option(
        "smollm2",
        "Model to run: a known name, a GGUF file, a Hugging Face directory or a hub name.",
    )
    dtype: str = _option(
        "auto",
        "Number format of weights and activations; auto: on a CPU int8 where it has instructions "
        "for it, else bfloat16 or float32; bfloat16 on CUDA.",
        choices=("auto", "int8", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = _option(
        "auto",
        "Number format of the KV cache; auto: as dtype.",
        choices=("auto", "int8", "float32", "bfloat16"),
    )
    device: str = _option(
        "auto",
        "Where the model runs; auto: CUDA if there is any.",
        choices=("auto", "cpu", "cuda"),
    )
    block_size: int = _option(16, "Token slots in one block of KV cache.", unit="tokens")
    num_blocks: int | None = _option(
        None,
        "Size of the device pool of KV cache. Default: as kv_cache_gib; if that is not given "
        f"either, {HOST_POOL_SHARE:.0%} of the available RAM ({CUDA_POOL_SHARE:.0%} of the free "
        "memory of a GPU), but no more than max_num_seqs full contexts.",
        unit="blocks",
    )
    kv_cache_gib: float | None = _option(
        None, "Size of the device pool of KV cache, instead of num_blocks.", unit="GiB"
    )
    elastic_memory: bool = _option(
        False,
        "Shrink the device pool while memory is short, by what the kernel reports of machine and "
        "cgroup (CUDA: by its free memory), and grow it back afterwards; its size at the start is "
        "the largest. docs/parking.md says when.",
    )
    swap_gib: float | None = _option(
        None,
        "RAM for parked KV cache; 0: victims are recomputed. Never more than "
        f"{SWAP_POOL_SHARE:.0%} of the RAM that is left. Default: {DEFAULT_SWAP_GIB:g}.",
        unit="GiB",
    )
    num_swap_blocks: int | None = _option(
        None, "Size of the swap pool, instead of swap_gib.", unit="blocks"
    )
    swap_dir: str | None = _option(
        None, "Directory in which a file for parked KV cache is made. Default: no disk is used."
    )
    swap_disk_gib: float | None = _option(
        None,
        "Disk for parked KV cache that RAM has no room for: size of the file in swap_dir, "
        f"allocated at the start. Default: {DEFAULT_SWAP_DISK_GIB:g}.",
        unit="GiB",
    )
    max_model_len: int | None = _option(
        None,
        "Longest sequence, prompt and answer. Default: the model's context.",
        unit="tokens",
    )
    max_num_seqs: int = _option(64, "Most sequences on the device at a time.", unit="sequences")
    max_num_batched_tokens: int = _option(512, "Most tokens one step computes.", unit="tokens")
    preemption_mode: str = _option(
        "auto",
        "How a running request gives way; auto: by whichever way costs less, as measured; "
        "recompute where the swap pool is full.",
        choices=PREEMPTION_MODES,
    )
    scheduling_policy: str = _option(
        "swapped-first",
        "Whose turn it is; docs/architecture.md explains each.",
        choices=tuple(POLICIES),
    )
    enable_prefix_caching: bool = _option(True, "Reuse the KV cache of equal prompt beginnings.")
    headroom: float = _option(
        1.0,
        "Blocks kept free for every running sequence when another comes in.",
        unit="blocks",
    )
    watermark: float = _option(
        0.0,
        "Share of the device pool, from 0 to less than 1, that stays free for growth when somebody "
        "comes in beside others of his class, where that is more than headroom.",
    )
    urgent_window: float = _option(
        30.0,
        "How long less urgent newcomers leave free what more urgent classes came to need; 0: they "
        "leave nothing.",
        unit="seconds",
    )
    background_tokens: int = _option(
        48,
        "Most prompt tokens in a step for classes less urgent than one seen within urgent_window.",
        unit="tokens",
    )
    preemption_threshold: float = _option(
        1.0,
        "Share of the device pool, 0 to 1, above which the least urgent running work is parked "
        "ahead of need, while a more urgent class runs or has been seen within urgent_window.",
    )
    max_queue: int | None = _option(
        1024,
        "Most sequences that wait, beyond those that can run; more are refused; none: no limit.",
        unit="sequences",
    )
    shed_load: bool = _option(
        True,
        "Refuse new work of the lowest class (429) while memory is saturated; docs/parking.md "
        "says when that is.",
    )
    priority_aging: float | None = _option(
        None,
        "A request that waits or is parked rises one class for every so many seconds of it, so "
        "that no class waits for ever; docs/parking.md has the bound. Default: waiting changes "
        "nothing.",
        unit="s",
    )
    demote_after_tokens: int | None = _option(
        None,
        "A request sinks one class for every so many tokens of its answer, so that long answers "
        "give way to short ones; best with priority_aging. Default: length changes nothing.",
        unit="tokens",
    )
    seed: int | None = _option(
        None, "Base of the seeds of requests that bring none of their own; none: from the system."
    )
    num_threads: int | None = _option(
        None, "CPU threads of the model. Default: what torch chooses.", unit="threads"
    )
    record: str | None = _option(
        None,
        "Record arrivals and scheduling decisions in this file, without texts and token ids, for "
        "layby replay and layby simulate.",
    )
    record_max_mib: int = _option(
        64,
        "Size at which a recording goes on in a new file, as soon as the engine is idle; "
        f"{KEPT_FILES} older ones are kept, as FILE.1 and so on.",
        unit="MiB",
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            _check_type(option.name, option.type, value)
            if choices and value not in choices:
                raise ConfigError(
                    f"{option.name} must be one of {', '.join(choices)}; got {value!r}"
                )
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ConfigError(
                f"num_blocks ({self.num_blocks}) and kv_cache_gib ({self.kv_cache_gib:g}) "
                "both set the size of the device pool; give one"
            )
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ConfigError(f"kv_cache_gib must be above 0, got {self.kv_cache_gib:g}")
        if self.swap_gib is not None and self.swap_gib < 0:
            raise ConfigError(f"swap_gib must be at least 0, got {self.swap_gib:g}")
        if self.swap_disk_gib is not None and self.swap_disk_gib <= 0:
            raise ConfigError(f"swap_disk_gib must be above 0, got {self.swap_disk_gib:g}")
        if self.swap_disk_gib is not None and self.swap_dir is None:
            raise ConfigError(
                f"swap_disk_gib is {self.swap_disk_gib:g}, but swap_dir does not say where"
            )
        if self.swap_dir is not None and (self.swap_gib == 0 or self.num_swap_blocks == 0):
            raise ConfigError(
                "with swap_dir, swap_gib or num_swap_blocks cannot be 0: parked work reaches the "
                "disk through RAM"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {self.num_threads}")
        if self.record is not None and not str(self.record):
            raise ConfigError("record must name a file, got ''")
        if self.record_max_mib < 1:
            raise ConfigError(f"record_max_mib must be at least 1, got {self.record_max_mib}")
        # The scheduler's own checks, now rather than after the model is loaded.
        self._scheduler_config(
            1 if self.num_blocks is None else self.num_blocks,
            self.num_swap_blocks or 0,
            self.max_model_len,
        )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Make a configuration of options by name.

        Raises:
            ConfigError: There is no such option; the message names those most like it.
        """
        names = [option.name for option in fields(cls)]
        for name in options:
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
                hint = (
                    f"did you mean {' or '.join(nearest)}?"
                    if nearest
                    else f"options are {', '.join(names)}"
                )
                raise ConfigError(f"unknown option {name!r}; {hint}")
        return cls(**options)

    def resolve(
        self,
        *,
        context_length: int,
        block_bytes: int,
        host_bytes: int,
        cuda_bytes: int | None = None,
    ) -> SchedulerConfig:
        """Settle the sizes that depend on the model and the machine.

        Args:
            context_length: Longest sequence of the model, in tokens.
            block_bytes: One block of KV cache, all layers.
            host_bytes: Available RAM.
            cuda_bytes: Free memory of the GPU that holds the device pool; None: RAM holds it.

        Raises:
            ConfigError: Something does not fit; the message has the numbers.
        """
        max_model_len = context_length if self.max_model_len is None else self.max_model_len
        if max_model_len > context_length:
            raise ConfigError(
                f"max_model_len ({max_model_len}) is more than the model's context "
                f"({counted(context_length, 'token')})"
            )
        num_blocks = self._num_blocks(block_bytes, max_model_len, host_bytes, cuda_bytes)
        left_bytes = host_bytes - (num_blocks * block_bytes if cuda_bytes is None else 0)
        num_swap_blocks = self._num_swap_blocks(block_bytes, left_bytes)
        if self.preemption_mode == "swap" and num_swap_blocks == 0:
            logger.warning(
                "preemption_mode is swap, but the swap pool has no block: "
                "whoever is preempted will be computed again"
            )
        return self._scheduler_config(
            num_blocks,
            num_swap_blocks,
            max_model_len,
            num_disk_blocks=self._num_disk_blocks(block_bytes) if num_swap_blocks else 0,
        )

    def _num_blocks(
        self, block_bytes: int, max_model_len: int, host_bytes: int, cuda_bytes: int | None
    ) -> int:
        if cuda_bytes is None:
            available, share = host_bytes, HOST_POOL_SHARE
        else:
            available, share = cuda_bytes, CUDA_POOL_SHARE
        if self.num_blocks is not None:
            num_blocks, asked = self.num_blocks, f"num_blocks={self.num_blocks}"
        elif self.kv_cache_gib is not None:
            num_blocks = int(self.kv_cache_gib * GIB) // block_bytes
            asked = f"kv_cache_gib={self.kv_cache_gib:g}"
        else:
            useful = self.max_num_seqs * -(-max_model_len // self.block_size)
            num_blocks = min(int(available * share) // block_bytes, useful)
            asked = f"the default of {share:.0%} of {available / GIB:.2f} GiB"
        if num_blocks < 1:
            raise ConfigError(
                f"{asked} holds less than one block of KV cache ({block_bytes / 2**20:.2f} MiB)"
            )
        if num_blocks * block_bytes > available:
            raise ConfigError(
                f"{asked} takes {num_blocks * block_bytes / GIB:.2f} GiB for "
                f"{counted(num_blocks, 'block')}; "
                f"{available / GIB:.2f} GiB are available"
            )
        return num_blocks

    def _num_swap_blocks(self, block_bytes: int, left_bytes: int) -> int:
        if self.num_swap_blocks is not None:
            if self.num_swap_blocks * block_bytes > left_bytes:
                raise ConfigError(
                    f"num_swap_blocks={self.num_swap_blocks} takes "
                    f"{self.num_swap_blocks * block_bytes / GIB:.2f} GiB; "
                    f"{left_bytes / GIB:.2f} GiB of RAM are left for it"
                )
            return self.num_swap_blocks
        if self.preemption_mode == "recompute" or self.scheduling_policy in (
            "recompute-only",
            "reserve",
        ):
            return 0  # nothing will ever be parked
        swap_gib = DEFAULT_SWAP_GIB if self.swap_gib is None else self.swap_gib
        asked_bytes, limit_bytes = int(swap_gib * GIB), int(left_bytes * SWAP_POOL_SHARE)
        if asked_bytes > limit_bytes and self.swap_gib is not None:
            logger.warning(
                "swap_gib=%g reduced to %.2f GiB: %.2f GiB of RAM are left",
                swap_gib,
                limit_bytes / GIB,
                left_bytes / GIB,
            )
        return min(asked_bytes, limit_bytes) // block_bytes

    def _num_disk_blocks(self, block_bytes: int) -> int:
        if self.swap_dir is None:
            return 0
        gib = DEFAULT_SWAP_DISK_GIB if self.swap_disk_gib is None else self.swap_disk_gib
        num_blocks = int(gib * GIB) // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"swap_disk_gib={gib:g} holds less than one block of KV cache "
                f"({block_bytes / 2**20:.2f} MiB)"
            )
        return num_blocks

    def _scheduler_config(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        max_model_len: int | None,
        num_disk_blocks: int = 0,
    ) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            num_disk_blocks=num_disk_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            preemption_mode=self.preemption_mode,
            policy=self.scheduling_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            headroom=self.headroom,
            watermark=self.watermark,
            urgent_window=self.urgent_window,
            background_tokens=self.background_tokens,
            preemption_threshold=self.preemption_threshold,
            max_queue=self.max_queue,
            priority_aging=self.priority_aging,
            demote_after_tokens=self.demote_after_tokens,
        )


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str, os.PathLike), "text"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a finite number"),
}


def _check_type(name: str, annotation: Any, value: object) -> None:
    """Compare a value with its field's annotation, which is text: ``int``, ``float | None`` …"""
    kind, _, optional = str(annotation).partition(" | ")
    if optional and value is None:
        return
    types, what = _KINDS[kind]
    # A bool is an int to Python, not to a person; and no size is beyond the floats.
    fits = isinstance(value, types) and isinstance(value, bool) == (kind == "bool")
    if not fits or (isinstance(value, (int, float)) and not abs(value) < 2.0**1000):
        raise ConfigError(f"{name} must be {what}, got {shown(value)}")
