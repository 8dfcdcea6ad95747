"""What a number format costs in quality: perplexity over Python's own help texts.

    python -m bench.quality [--tokens 50000] [--dtypes float32,int8]

The text is that of ``pydoc_data.topics``, in windows of 1,024 tokens. Every token of a window but
the first is predicted from those before it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pydoc_data.topics import topics

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.progress import Progress

from layby.execution.batch import build_batch
from layby.models import LoadedModel, load
from layby.models.networks import build_network
from layby.scheduling import Request, ScheduledSequence

WINDOW, CHUNK, BLOCK = 1024, 256, 16


def perplexity(model: LoadedModel, dtype: str, tokens: list[int], progress: Progress) -> float:
    """exp of the mean negative log-likelihood, natural logarithm."""
    network = build_network(
        model, dtype=dtype, kv_cache_dtype="auto", device=torch.device("cpu"), block_size=BLOCK
    )
    kv_format = network.kv_format(BLOCK)
    pool = torch.zeros((WINDOW // BLOCK, *kv_format.shape), dtype=kv_format.dtype)
    total, count = 0.0, 0
    task = progress.add_task(dtype, total=len(tokens))
    for first in range(0, len(tokens), WINDOW):
        window = tokens[first : first + WINDOW]
        if len(window) < 2:
            break
        sequence = Request("a", window, max_tokens=1).sequences[0]
        sequence.block_table = list(range(WINDOW // BLOCK))
        for start in range(0, len(window), CHUNK):
            size = min(CHUNK, len(window) - start)
            item = ScheduledSequence(sequence, start, size, ())
            hidden = network.forward(build_batch([item], block_size=BLOCK).flat, pool)
            wanted = torch.tensor(window[start + 1 : start + size + 1])
            logits = network.logits(hidden[: len(wanted)])
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            count += len(wanted)
            progress.advance(task, size)
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    options = parser.parse_args()
    model = load(options.model, allow_download=True)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = model.tokenizer.encode(text)[: options.tokens]
    base = None
    with Progress(console=Console(stderr=True)) as progress:
        for dtype in options.dtypes.split(","):
            start = time.perf_counter()
            value = perplexity(model, dtype, tokens, progress)
            base = base or value
            seconds = time.perf_counter() - start
            progress.console.print(
                f"{dtype:9s} perplexity {value:.4f}  {value / base - 1:+.2%}  ({seconds:.0f} s)"
            )


if __name__ == "__main__":
    main()
