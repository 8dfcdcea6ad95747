"""What an engine says of itself when it starts."""

from __future__ import annotations

import pytest

from layby.engine.build import told_pools
from layby.errors import sized
from layby.scheduling import SchedulerConfig


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 MiB"),
        (10 * 184_320, "1.8 MiB"),
        (2**30 - 2**20, "1023.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
    ],
)
def test_sizes_are_told_in_a_unit_that_shows_them(num_bytes: int, text: str) -> None:
    assert sized(num_bytes) == text


def test_pools_are_told_with_their_size_and_only_those_that_are_there() -> None:
    config = SchedulerConfig(num_blocks=120)
    assert told_pools(config, 2**18) == "KV cache 120 blocks (30.0 MiB), swap 0 blocks"
    config = SchedulerConfig(num_blocks=1, num_swap_blocks=10, num_disk_blocks=2**13)
    assert told_pools(config, 2**18) == (
        "KV cache 1 block (0.2 MiB), swap 10 blocks (2.5 MiB), on disk 8192 blocks (2.00 GiB)"
    )
