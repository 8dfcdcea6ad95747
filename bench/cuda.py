"""What a GPU takes for steps, for moves beside them, and for work under pressure.

    python -m bench.cuda [--shape llama3-8b] [--parts steps moves] [--json FILE]

It has never run on a GPU; ``--device cpu --shape tiny`` tries it out without one. Weights are
random, so no model is needed. Parts:

* ``steps``: decoding 1, 16 and 64 sequences of 500 tokens, and prompts of 512 and 2,048 tokens.
* ``products``: in calls of exact sizes, and as the library would do them.
* ``moves``: parking 1,000 tokens of KV cache and bringing them back: alone, and beside a decode
  step of 16, overlapped and not; and computing the same tokens again.
* ``load``: requests for three times the memory there is, by parking with and without overlap and by
  computing again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layby.bench.machine import describe_machine
from layby.engine import Engine
from layby.engine.toy import ByteTokenizer
from layby.execution.batch import build_batch
from layby.execution.torch_executor import TorchExecutor
from layby.models.config import ModelConfig
from layby.models.exact_products import ExactOps
from layby.models.transformer import Transformer
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, Scheduler, SchedulerConfig
from layby.scheduling.plan import BlockMove, ScheduledSequence, StepPlan

LLAMA3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    context_length=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
SHAPES = {
    "llama3-8b": LLAMA3_8B,
    "llama3.2-1b": replace(
        LLAMA3_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64
    ),
    "tiny": replace(
        LLAMA3_8B, vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16,
    ),
}  # fmt: skip
BLOCK_SIZE = 16
MOVED_TOKENS = 1000
MOVED_BLOCKS = -(-MOVED_TOKENS // BLOCK_SIZE)


class RandomWeights(dict[str, Tensor]):
    """Tensors by Hugging Face's names, made when they are asked for and not kept."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab, hidden),
            "lm_head.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            self._shapes |= {
                f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, inner),
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
            }

    def get(self, name: str, default: Any = None) -> Any:
        shape = self._shapes.get(name)
        if shape is None:
            return default
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        numbers = torch.randn(
            shape, dtype=torch.bfloat16, device=self._device, generator=self._generator
        )
        return numbers.mul_(shape[1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)


class Unoverlapped(TorchExecutor):
    """Copies nothing ahead, and computes only when all moves are done."""

    def _move(self, plan: StepPlan) -> Any:
        plan.next_in = None
        stopwatch = super()._move(plan)
        self.cache.synchronize()
        return stopwatch


def tokenizer_of(model: Transformer) -> ByteTokenizer:
    """Bytes, and a word for every other token."""
    return ByteTokenizer(pieces=[b" word"] * (model.config.vocab_size - 258))


def build(model: Transformer, kind: type[TorchExecutor], num_blocks: int) -> TorchExecutor:
    executor = kind(
        model, block_size=BLOCK_SIZE, num_blocks=num_blocks, num_swap_blocks=4 * num_blocks
    )
    for start in range(0, num_blocks, 256):
        executor.cache.pool[start : start + 256].zero_()
    return executor


class Timer:
    """Medians of seconds, once the device has caught up."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.on_gpu = device.type == "cuda"
        self.rounds = rounds

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def once(self, work: Callable[[], object]) -> float:
        self.settle()
        start = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - start

    def ms(self, work: Callable[[], object]) -> float:
        """Median milliseconds of several, after one to warm up."""
        self.once(work)
        return round(1e3 * statistics.median(self.once(work) for _ in range(self.rounds)), 3)


def sequence(config: ModelConfig, tokens: int, first_block: int) -> ScheduledSequence:
    """A share of a step: the last token of a sequence whose blocks follow each other."""
    prompt = np.random.default_rng(first_block).integers(0, config.vocab_size, tokens).tolist()
    request = Request(
        f"r{first_block}", prompt, max_tokens=8,
        payload=SamplingParams(temperature=1.0, seed=first_block, max_tokens=8),
    )  # fmt: skip
    [seq] = request.sequences
    seq.block_table = list(range(first_block, first_block + -(-(tokens + 8) // BLOCK_SIZE)))
    return ScheduledSequence(seq, tokens - 1, 1, (seq,))


def decode_plan(config: ModelConfig, count: int, tokens: int) -> StepPlan:
    blocks = -(-(tokens + 8) // BLOCK_SIZE)
    items = [sequence(config, tokens, index * blocks) for index in range(count)]
    return StepPlan(1, 0.0, scheduled=items)


def prefill_plan(config: ModelConfig, tokens: int) -> StepPlan:
    item = sequence(config, tokens, 0)
    item.start, item.num_tokens = 0, tokens
    return StepPlan(1, 0.0, scheduled=[item])


def measure_steps(model: Transformer, timer: Timer, context: int) -> dict[str, Any]:
    """Whole steps, the sampling of their tokens included; ``launching`` is what Python takes for
    the forward pass."""
    executor = build(model, TorchExecutor, 64 * (context // BLOCK_SIZE + 2))
    result: dict[str, Any] = {}
    for count in (1, 16, 64):
        plan = decode_plan(model.config, count, context)
        result[f"decode_{count}_ms"] = timer.ms(partial(executor.execute, plan))
        batch = build_batch(plan.scheduled, block_size=BLOCK_SIZE)
        forward = partial(model.forward, batch.flat, executor.cache.pool)
        result[f"forward_{count}_ms"] = timer.ms(forward)
        timer.settle()
        start = time.perf_counter()
        forward()
        result[f"launching_{count}_ms"] = round(1e3 * (time.perf_counter() - start), 3)
    for tokens in (512, 2048):
        plan = prefill_plan(model.config, tokens if context > 100 else tokens // 8)
        result[f"prefill_{tokens}_ms"] = timer.ms(partial(executor.execute, plan))
    executor.close()
    return result


def measure_products(model: Transformer, timer: Timer) -> dict[str, Any]:
    """Products in exact calls, against one call of the library for all rows."""
    result: dict[str, Any] = {}
    ops = model._ops
    if isinstance(ops, ExactOps):
        result["sizes"] = ops.description
    layer = model._layers[0]
    weight = layer.gate_up.weight
    for rows in (1, 16, 64, 512, 2048):
        x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
        exact = timer.ms(lambda x=x: ops.linear(x, weight, None))
        free = timer.ms(lambda x=x: torch.nn.functional.linear(x, weight))
        result[f"gate_up_{rows}_rows_ms"] = {"exact": exact, "one call": free}
    return result


OUT = [BlockMove(2 * index + 1, index) for index in range(MOVED_BLOCKS)]
BACK = [BlockMove(index, 2 * index + 1) for index in range(MOVED_BLOCKS)]
SWAP_BLOCKS = list(range(MOVED_BLOCKS))


def measure_moves(model: Transformer, timer: Timer, context: int) -> dict[str, Any]:
    """1,000 tokens out and in: alone, and what they add to a decode step of 16."""
    num_blocks = 16 * (context // BLOCK_SIZE + 2) + 2 * MOVED_BLOCKS
    moved_bytes = MOVED_BLOCKS * model.kv_format(BLOCK_SIZE).block_bytes
    plan = decode_plan(model.config, 16, context)
    for item in plan.scheduled:  # their blocks lie behind those that are moved
        table = item.sequence.block_table
        item.sequence.block_table = [block + 2 * MOVED_BLOCKS for block in table]
    again = prefill_plan(model.config, MOVED_TOKENS if context > 100 else 100)
    again.scheduled[0].sequence.block_table = list(range(MOVED_BLOCKS + 1))
    result: dict[str, Any] = {"moved_mib": round(moved_bytes / 2**20, 1)}

    executor = build(model, TorchExecutor, num_blocks)
    for name, move, moves in (
        ("out", executor.cache.swap_out, OUT),
        ("in", executor.cache.swap_in, BACK),
    ):
        ms = timer.ms(lambda move=move, moves=moves: (move(moves), executor.cache.synchronize()))
        result[f"{name}_alone"] = {"ms": ms, "GB/s": round(moved_bytes / ms / 1e6, 1)}
    result["overlapped"] = moves_beside(executor, timer, plan, ahead=True)
    executor.close()
    executor = build(model, Unoverlapped, num_blocks)
    result["not overlapped"] = moves_beside(executor, timer, plan, ahead=False)
    result["recompute_ms"] = timer.ms(partial(executor.execute, again))
    executor.close()
    return result


def moves_beside(
    executor: TorchExecutor, timer: Timer, plan: StepPlan, *, ahead: bool
) -> dict[str, Any]:
    """Milliseconds of a step with moves and without, in turns."""
    cache = executor.cache
    times: dict[str, list[float]] = {}

    def step(name: str, swap_out: list[BlockMove], swap_in: list[BlockMove]) -> None:
        work = partial(executor.execute, replace(plan, swap_out=swap_out, swap_in=swap_in))
        times.setdefault(name, []).append(timer.once(work))

    for turn in range(timer.rounds + 1):
        if turn == 1:
            times.clear()  # the first warmed up
        step("plain", [], [])
        step("out", OUT, [])
        cache.overwritten(SWAP_BLOCKS)  # what is copied ahead is forgotten
        step("in", [], BACK)
        if ahead:
            cache.overwritten(SWAP_BLOCKS)
            cache.prefetch(SWAP_BLOCKS)
            step("beside a copy ahead", [], [])
            step("in, copied ahead", [], BACK)
    return {name: round(1e3 * statistics.median(seconds), 3) for name, seconds in times.items()}


def measure_load(model: Transformer, *, small: bool) -> dict[str, Any]:
    """Requests that need about three times the pool; greedy, of fixed lengths."""
    count, prompt, output = (8, 40, 24) if small else (48, 500, 200)
    blocks = -(-(prompt + output) // BLOCK_SIZE)
    num_blocks = count * blocks // 3
    variants: tuple[tuple[str, type[TorchExecutor], str], ...] = (
        ("warm-up", TorchExecutor, "swap"),
        ("swap, overlapped", TorchExecutor, "swap"),
        ("swap, not overlapped", Unoverlapped, "swap"),
        ("recompute", TorchExecutor, "recompute"),
        ("auto", TorchExecutor, "auto"),
        ("swap, overlapped, again", TorchExecutor, "swap"),
    )
    result: dict[str, Any] = {
        "requests": count, "prompt": prompt, "output": output, "blocks": num_blocks
    }  # fmt: skip
    wanted = None
    for name, kind, mode in variants:
        config = SchedulerConfig(
            num_blocks=num_blocks, num_swap_blocks=4 * num_blocks, block_size=BLOCK_SIZE,
            max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=2048,
            preemption_mode=mode, headroom=0,
        )  # fmt: skip
        executor = build(model, kind, num_blocks)
        engine = Engine(
            Scheduler(config), executor, tokenizer_of(model), vocab_size=model.config.vocab_size,
            max_model_len=2048, seed=0,
        )  # fmt: skip
        figures, tokens = serve(engine, count if name != "warm-up" else 4, prompt, output)
        if name != "warm-up":
            wanted = wanted or tokens
            result[name] = figures | {"same tokens as the first": tokens == wanted}
        engine.close()
        del engine, executor
        gc.collect()
    return result


def serve(
    engine: Engine, count: int, prompt: int, output: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Requests that come in two waves, the second more urgent."""
    draw = np.random.default_rng(0)
    ids, last, gaps = [], {}, []
    tokens: dict[str, list[int]] = {}
    left = [draw.integers(0, 256, prompt).tolist() for _ in range(count)]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    steps = 0
    while left or engine.has_unfinished:
        if left and steps % 4 == 0:
            urgent = len(left) % 2
            ids.append(engine.add_request(left.pop(), params, priority=urgent))
        for delta in engine.step():
            now = time.perf_counter()
            assert delta.error is None, delta.error
            for piece in delta.outputs:
                tokens.setdefault(delta.request_id, []).extend(piece.token_ids)
            if delta.request_id in last:
                gaps.append(now - last[delta.request_id])
            last[delta.request_id] = now
        steps += 1
    duration_s = time.perf_counter() - started
    stats = engine.stats()
    figures = {
        "tokens_per_s": round(count * output / duration_s, 1),
        "duration_s": round(duration_s, 2),
        "steps": steps,
        "itl_p50_ms": round(1e3 * float(np.percentile(gaps, 50)), 2),
        "itl_p99_ms": round(1e3 * float(np.percentile(gaps, 99)), 2),
        "itl_max_ms": round(1e3 * max(gaps), 2),
        "preemptions_swap": stats.preemptions_swap,
        "preemptions_recompute": stats.preemptions_recompute,
        "recomputed_tokens": stats.recomputed_tokens,
    }
    return figures, [tokens[request_id] for request_id in ids]


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--parts", nargs="*", default=["steps", "products", "moves", "load"],
        choices=["steps", "products", "moves", "load"],
    )  # fmt: skip
    parser.add_argument("--json")
    args = parser.parse_args()
    device = torch.device(args.device)
    timer = Timer(device, args.rounds)
    small = args.shape == "tiny"
    context = 48 if small else 500
    result: dict[str, Any] = {"machine": describe_machine(), "shape": args.shape}
    started = time.perf_counter()
    config = SHAPES[args.shape]
    weights = RandomWeights(config, device)
    model = Transformer(config, weights, dtype=torch.bfloat16, device=device)
    timer.settle()
    result["made_s"] = round(time.perf_counter() - started, 1)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "steps": partial(measure_steps, model, timer, context),
        "products": partial(measure_products, model, timer),
        "moves": partial(measure_moves, model, timer, context),
        "load": partial(measure_load, model, small=small),
    }
    for name in args.parts:
        result[name] = parts[name]()
        print(name, json.dumps(result[name]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
