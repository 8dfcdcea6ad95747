"""A token's result has the same bits whatever shares its batch and however its prompt was cut.

This is what makes a parked, recomputed or prefix-cached request give the same tokens as one that
ran alone. It is tested on the default model's geometry, because which kernel a library picks
depends on sizes.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from layby.execution.batch import build_batch
from layby.models.config import ModelConfig
from layby.models.network import Network
from layby.models.ops import TorchOps
from layby.scheduling.plan import ScheduledSequence
from tests.execution.harness import (
    NETWORKS,
    Blocks,
    make_network,
    make_sequence,
    poisoned_pool,
    random_tokens,
    random_weights,
)

SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=1024,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tied_embeddings=True,
)
LENGTHS = (3, 40, 129, 180)
BLOCK_SIZE = 16
NUM_BLOCKS = 96


class Run:
    """Forward passes over one NaN-filled pool, keeping hidden states and logits by position."""

    def __init__(self, model: Network, prompts: list[list[int]], seed: int) -> None:
        self.model = model
        self.pool = poisoned_pool(model, NUM_BLOCKS, BLOCK_SIZE)
        blocks = Blocks(NUM_BLOCKS, seed)
        self.sequences = [
            make_sequence(str(i), prompt, block_table=blocks.take(-(-len(prompt) // BLOCK_SIZE)))
            for i, prompt in enumerate(prompts)
        ]
        self.done = [0] * len(prompts)
        self.hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, counts: dict[int, int]) -> None:
        """Compute so many more positions of these sequences, in one batch."""
        items = [
            ScheduledSequence(self.sequences[i], self.done[i], count, ())
            for i, count in counts.items()
        ]
        batch = build_batch(items, block_size=BLOCK_SIZE)
        hidden = self.model.forward(batch.flat, self.pool)
        logits = self.model.logits(hidden)
        for item, first in zip(batch.items, batch.flat.first_rows, strict=True):
            i = int(item.sequence.request.request_id)
            rows = slice(first, first + item.num_tokens)
            self.hidden[i].append(hidden[rows])
            self.logits[i].append(logits[rows])
            self.done[i] += item.num_tokens

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Hidden states and logits of each sequence."""
        return [
            (torch.cat(hidden), torch.cat(logits))
            for hidden, logits in zip(self.hidden, self.logits, strict=True)
        ]


@pytest.mark.parametrize("kind", NETWORKS)
def test_rows_have_the_same_bits_in_every_batch_and_every_chunking(kind: str) -> None:
    """Last bits decide near-ties; one that moves with the batch makes parking visible in text."""
    model = make_network(SMOLLM2, random_weights(SMOLLM2), kind)
    prompts = [random_tokens(n, SMOLLM2.vocab_size, seed=n) for n in LENGTHS]
    alone = Run(model, prompts, seed=0)
    for i, prompt in enumerate(prompts):
        for _ in prompt:
            alone.step({i: 1})
    expected = alone.results()

    source = random.Random(0)
    for trial in range(5):
        mixed = Run(model, prompts, seed=trial + 1)
        sizes = ([1], [1, 2, 3], [5, 17, 64], [1000], [1, 1, 1, 2, 4, 8, 30, 130, 300])[trial % 5]
        while any(done < len(prompt) for done, prompt in zip(mixed.done, prompts, strict=True)):
            counts = {
                i: min(len(prompt) - mixed.done[i], source.choice(sizes))
                for i, prompt in enumerate(prompts)
                if mixed.done[i] < len(prompt) and source.random() < 0.8
            }
            if counts:
                mixed.step(counts)
        for length, found, wanted in zip(LENGTHS, mixed.results(), expected, strict=True):
            assert torch.equal(found[0], wanted[0]), f"hidden states of length {length}, {sizes}"
            assert torch.equal(found[1], wanted[1]), f"logits of length {length}, {sizes}"


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_finished_neighbour_full_of_nan_leaves_other_rows_alone(kind: str) -> None:
    """Zero times NaN is NaN: stale garbage in a block must be masked, not weighted with zero."""
    model = make_network(SMOLLM2, random_weights(SMOLLM2), kind)
    prompts = [random_tokens(140, SMOLLM2.vocab_size, seed=i) for i in range(3)]
    clean, dirty = Run(model, prompts, seed=0), Run(model, prompts, seed=0)
    clean.pool.zero_()
    for run in (clean, dirty):
        run.step({0: 140, 1: 100, 2: 1})
        run.pool[run.sequences[2].block_table] = poisoned_pool(model, 1, BLOCK_SIZE)[0]
        run.step({1: 40})
    for i in (0, 1):
        assert torch.equal(clean.results()[i][1], dirty.results()[i][1])
        assert dirty.results()[i][1].isfinite().all()


def test_silu_does_not_depend_on_where_a_number_lies() -> None:
    """torch's own SiLU computes the tail of a buffer with another exponential than its body."""
    torch.manual_seed(0)
    x = torch.randn(64, 2 * 37) * 4
    whole = TorchOps().silu_mul(x)
    torch.testing.assert_close(whole, F.silu(x[:, :37]) * x[:, 37:])
    rows = torch.cat([TorchOps().silu_mul(row) for row in x.split(1)])
    assert torch.equal(whole, rows)


def test_norm_and_rotation_do_not_depend_on_the_number_of_rows() -> None:
    """A reduction may be split over threads when it is the only one."""
    torch.manual_seed(0)
    ops = TorchOps()
    x, weight = torch.randn(64, 4100), torch.rand(4100)
    whole = ops.rms_norm(x, weight, 1e-5)
    assert torch.equal(whole, torch.cat([ops.rms_norm(r, weight, 1e-5) for r in x.split(4)]))
    expected = x * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(whole, expected.float())

    heads, angles = torch.randn(64, 3, 14), torch.randn(64, 7) * 100
    turned = heads.clone()
    ops.rotate(turned, angles.cos(), angles.sin())
    pairs = torch.complex(heads[..., :7], heads[..., 7:])
    wanted = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat([wanted.real, wanted.imag], -1))
    for i in range(64):
        one = heads[i : i + 1].clone()
        ops.rotate(one, angles[i : i + 1].cos(), angles[i : i + 1].sin())
        assert torch.equal(one, turned[i : i + 1])
