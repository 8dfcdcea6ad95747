"""Profiles: a cost model with everything it is true of, as a file or built in.

A measured profile comes from ``layby profile``. The built-in ones are *estimates*, worked out from
what is printed in datasheets and from the efficiency factors below; nobody has measured them here.
They tell which way a setting moves a figure, not what the figure will be.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import layby
from layby.errors import ConfigError, LaybyError, shown
from layby.scheduling import SchedulerConfig
from layby.simulate.cost import CostModel, Knots, MoveCost

SCHEMA = 1
"""Version of the file's layout."""

MEASURED = "measured"
ANALYTIC = "analytic (estimate)"


@dataclass(frozen=True, slots=True)
class FitError:
    """How far predicted step times are from measured ones, in percent of the measured.

    Attributes:
        points: Kinds of steps compared.
        mean_pct, p90_pct, max_pct: Of the absolute errors.
    """

    points: int
    mean_pct: float
    p90_pct: float
    max_pct: float


@dataclass(frozen=True, slots=True)
class SchedulerDefaults:
    """The scheduler settings that an engine of this kind would run with.

    Attributes are those of :class:`~layby.scheduling.SchedulerConfig`.
    """

    num_blocks: int
    num_swap_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Profile:
    """What a simulation needs to know about an engine and its machine.

    Attributes:
        name: What it is called in reports.
        kind: ``measured``, or ``analytic (estimate)``.
        model: Which model.
        dtype, kv_cache_dtype: Number formats of the computation and of the KV cache.
        device: ``cpu`` or ``cuda``.
        machine: What it runs on, as ``layby bench`` describes it.
        block_size: Tokens of one block.
        block_bytes: Bytes of one block, all layers.
        scheduler: Settings to begin with.
        cost: Step times.
        fit: Error on the steps that ``cost`` was fitted to; None if nothing was measured.
        held_out: Error on steps of other sizes, kept out of the fit; None if there are none.
        created: Date and time, ISO 8601.
        layby: Version that made it.

    Raises:
        ConfigError: A value cannot be.
    """

    name: str
    kind: str
    model: str
    dtype: str
    kv_cache_dtype: str
    device: str
    machine: Mapping[str, Any]
    block_size: int
    block_bytes: int
    scheduler: SchedulerDefaults
    cost: CostModel
    fit: FitError | None
    held_out: FitError | None
    created: str
    layby: str = field(default=layby.__version__)

    def __post_init__(self) -> None:
        if self.kind not in (MEASURED, ANALYTIC):
            raise ConfigError(f"kind must be {MEASURED!r} or {ANALYTIC!r}, got {shown(self.kind)}")
        if self.block_bytes < 1:
            raise ConfigError(f"block_bytes must be at least 1, got {shown(self.block_bytes)}")
        SchedulerConfig(block_size=self.block_size, **asdict(self.scheduler))  # its own checks

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        return {"schema": SCHEMA, **_plain(self)}

    def save(self, path: str | Path) -> None:
        """Write it to a file that ``load_profile`` reads.

        Raises:
            LaybyError: The file cannot be written.
        """
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise LaybyError(f"cannot write {path}: {error.strerror or error}") from error


def load_profile(name_or_path: str | Path) -> Profile:
    """A built-in profile by its name, or one from a file.

    Raises:
        ConfigError: There is no such profile, or the file is none; names file and field.
    """
    name = str(name_or_path)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"there is no profile {name}: {hint}It must be a file that layby profile has "
            f"written, or one of {', '.join(BUILT_IN)}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not a profile: it is no text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the profile {name}: {why}") from None
    return _parse(name, text)


# --- files ---


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _parse(name: str, text: str) -> Profile:
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not a profile: {error}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise ConfigError(f"{name}: not a profile: it is no JSON object with a field 'schema'")
    schema = data.pop("schema")
    if isinstance(schema, bool) or schema != SCHEMA:
        raise ConfigError(
            f"{name}: field schema is {shown(schema)}; this version of Layby reads {SCHEMA}"
        )
    try:
        profile: Profile = _build(Profile, data, "")
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return profile


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _build(kind: Any, data: object, place: str) -> Any:
    """A dataclass from a JSON object with exactly its fields. ``place`` is the path to it.

    Only what may be unknown may be missing: files of earlier versions lack it.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"field {place} must be an object, got {shown(data)}")
    names = [option.name for option in fields(kind) if option.init]
    prefix = f"{place}." if place else ""
    for name in data:
        if name not in names:
            raise ConfigError(f"field {prefix}{shown(name).strip(chr(39))} is unknown")
    unknown = {option.name for option in fields(kind) if option.default is None}
    for name in names:
        if name not in data and name not in unknown:
            raise ConfigError(f"field {prefix}{name} is missing")
    hints = get_type_hints(kind)
    values = {
        name: _value(hints[name], data[name], prefix + name) for name in names if name in data
    }
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"in {place}: {error}" if place else str(error)) from None


def _value(kind: Any, data: object, place: str) -> Any:
    """A value of an annotated type, from what JSON has for it."""
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if data is None else _value(inner, data, place)
    if is_dataclass(kind):
        return _build(kind, data, place)
    if kind == Knots:  # checked by the cost model, pair by pair
        if not isinstance(data, list):
            raise ConfigError(f"field {place} must be a list, got {shown(data)}")
        return tuple(tuple(item) if isinstance(item, list) else item for item in data)
    if get_origin(kind) is Mapping:
        if not isinstance(data, dict):
            raise ConfigError(f"field {place} must be an object, got {shown(data)}")
        return data
    wanted, what = {
        str: ((str,), "text"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
    }[kind]
    if isinstance(data, bool) or not isinstance(data, wanted):
        raise ConfigError(f"field {place} must be {what}, got {shown(data)}")
    return data


# --- estimates ---


@dataclass(frozen=True, slots=True)
class Gpu:
    """Datasheet figures of one GPU.

    Attributes:
        flops_per_s: Dense bfloat16.
        hbm_bytes_per_s: Memory bandwidth.
        hbm_bytes: Memory.
        pcie_bytes_per_s: To and from the host, one direction.
        nvlink_bytes_per_s: To the other GPUs, one direction.
    """

    name: str
    flops_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a Llama's shape costs something."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int

    @property
    def layer_params(self) -> int:
        """Parameters that every row is multiplied with."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_params(self) -> int:
        """Parameters that every sampled row is multiplied with; the embedding has as many."""
        return self.hidden_size * self.vocab_size

    @property
    def num_params(self) -> int:
        """All of them, but for the norms."""
        return self.layer_params + 2 * self.head_params

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """For one row and one position that it attends to: scores, and the weighted sum."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


A100 = Gpu("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 80e9, 31.5e9, 300e9)
"""NVIDIA A100 datasheet: PCIe 4.0 × 16; NVLink 600 GB/s in both directions together."""

H100 = Gpu("NVIDIA H100 SXM 80 GB", 989e12, 3.35e12, 80e9, 63e9, 450e9)
"""NVIDIA H100 datasheet: PCIe 5.0 × 16; NVLink 900 GB/s in both directions together."""

LLAMA3_8B = Geometry("Llama 3 8B", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
"""The context is that of Llama 3.1, whose geometry is otherwise the same (Llama 3: 8,192)."""

LLAMA3_70B = Geometry("Llama 3 70B", 80, 8192, 28672, 64, 8, 128, 128256, 131072)
"""As above."""

MATMUL_EFFICIENCY = 0.6
"""Share of the datasheet's FLOP/s that large matrix products reach."""

ATTENTION_EFFICIENCY = 0.4
"""The same for attention over a prompt."""

HBM_EFFICIENCY = 0.8
"""Share of the memory bandwidth that reading weights and KV cache reaches."""

PCIE_EFFICIENCY = 0.8
"""Share of the PCIe rate that copies between pinned memory and HBM reach."""

NVLINK_EFFICIENCY = 0.7
"""Share of the NVLink rate that an all-reduce reaches."""

ALL_REDUCE_S = 15e-6
"""Latency of one all-reduce among 4 GPUs; there are two in a layer."""

STEP_OVERHEAD_S = 2e-3
"""Scheduling, launching and fetching the result, for a step of any size."""

SEQUENCE_OVERHEAD_S = 10e-6
"""Scheduling, batch layout and detokenising, per sequence and step."""

SAMPLE_PASSES = 6
"""How often sampling passes over a row of float32 logits, reading or writing."""

MOVE_OVERHEAD_S = 20e-6
"""Launching and awaiting the block moves of a step."""

HBM_SHARE = 0.9
"""Share of the HBM that weights and KV cache take together."""

SWAP_POOL_BYTES = 64 * 2**30
"""Host RAM for parked KV cache."""

DISK_WRITE_BYTES_PER_S = 3e9
"""What an NVMe drive of PCIe 4.0 × 4 takes for long."""

DISK_READ_BYTES_PER_S = 5e9
"""What it gives."""

DISK_OVERHEAD_S = 100e-6
"""Beginning a transfer, and noticing its end."""

BLOCK_SIZE = 16
BFLOAT16_BYTES = 2
FLOAT32_BYTES = 4
MOST_ROWS = 16384
"""Where the curve of rows ends; it goes on straight."""


def analytic_profile(name: str, gpu: Gpu, num_gpus: int, model: Geometry) -> Profile:
    """Estimate a profile: bfloat16, tensor parallel over ``num_gpus`` that share one host.

    Matrix products take the longer of reading the weights and multiplying; everything else is
    added to that, but for copies to and from the host, which run beside the step. Every figure that
    goes in is a constant of this module.
    """
    flops_per_s = num_gpus * gpu.flops_per_s
    hbm_bytes_per_s = num_gpus * gpu.hbm_bytes_per_s * HBM_EFFICIENCY
    pcie_bytes_per_s = num_gpus * gpu.pcie_bytes_per_s * PCIE_EFFICIENCY
    block_bytes = BLOCK_SIZE * model.kv_numbers * BFLOAT16_BYTES

    # A ring: every GPU sends (n - 1) / n of the data twice.
    reduces = 2 * model.num_layers if num_gpus > 1 else 0
    row_bytes = model.hidden_size * BFLOAT16_BYTES * 2 * (num_gpus - 1) / num_gpus
    reduce_row_s = reduces * row_bytes / (gpu.nvlink_bytes_per_s * NVLINK_EFFICIENCY)

    def products(params: int, most: int) -> list[tuple[int, float]]:
        """Reading them once, or multiplying so many rows with them: a roofline."""
        read_s = params * BFLOAT16_BYTES / hbm_bytes_per_s
        row_s = 2 * params / (flops_per_s * MATMUL_EFFICIENCY)
        bend = int(read_s / row_s)
        counts = (1, bend, bend + 1, most)
        return [(count, max(read_s, row_s * count)) for count in counts]

    rows = [
        (count, STEP_OVERHEAD_S + reduces * ALL_REDUCE_S + seconds + reduce_row_s * count)
        for count, seconds in products(model.layer_params, MOST_ROWS)
    ]
    sample_s = SAMPLE_PASSES * model.vocab_size * FLOAT32_BYTES / hbm_bytes_per_s
    samples = [
        (count, seconds + sample_s * count)
        for count, seconds in products(model.head_params, MOST_ROWS)
    ]
    # Gathering a block into one piece reads and writes it; the way to the host is beside.
    on_device_s = 2 * block_bytes / hbm_bytes_per_s
    move = MoveCost(MOVE_OVERHEAD_S, on_device_s, block_bytes / pcie_bytes_per_s)
    pool_bytes = num_gpus * gpu.hbm_bytes * HBM_SHARE - model.num_params * BFLOAT16_BYTES
    return Profile(
        name=name,
        kind=ANALYTIC,
        model=model.name,
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        device="cuda",
        machine={"gpu": gpu.name, "gpus": num_gpus},
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes,
        scheduler=SchedulerDefaults(
            num_blocks=int(pool_bytes // block_bytes),
            num_swap_blocks=SWAP_POOL_BYTES // block_bytes,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=model.context_length,
        ),
        cost=CostModel(
            rows_s=((0, STEP_OVERHEAD_S), *rows),
            samples_s=((0, 0.0), *samples),
            decode_context_s=model.kv_numbers * BFLOAT16_BYTES / hbm_bytes_per_s,
            prefill_context_s=model.attention_flops / (flops_per_s * ATTENTION_EFFICIENCY),
            sequence_s=SEQUENCE_OVERHEAD_S,
            swap_out=move,
            swap_in=move,
            copy=MoveCost(MOVE_OVERHEAD_S, on_device_s),
            demote=MoveCost(DISK_OVERHEAD_S, block_bytes / DISK_WRITE_BYTES_PER_S),
            promote=MoveCost(DISK_OVERHEAD_S, block_bytes / DISK_READ_BYTES_PER_S),
        ),
        fit=None,
        held_out=None,
        created="2026-11-29",
    )


def _built_in(name: str, gpu: Gpu, num_gpus: int, model: Geometry) -> Callable[[], Profile]:
    return lambda: analytic_profile(name, gpu, num_gpus, model)


BUILT_IN: Mapping[str, Callable[[], Profile]] = {
    name: _built_in(name, gpu, num_gpus, model)
    for name, gpu, num_gpus, model in (
        ("a100-llama3-8b", A100, 1, LLAMA3_8B),
        ("h100-llama3-8b", H100, 1, LLAMA3_8B),
        ("a100x4-llama3-70b", A100, 4, LLAMA3_70B),
        ("h100x4-llama3-70b", H100, 4, LLAMA3_70B),
    )
}
"""The estimates, by name."""
