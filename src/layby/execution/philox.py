"""Counter-based random numbers: Philox-4x32-10.

Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The result is
a pure function of key and counter, so a draw depends on nothing that happened before it: batch
mates, parking or a restart cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_KEY_STEPS_SO_FAR = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _KEY_STEPS


def philox_4x32(
    counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Encrypt counters ``[N, 4]`` under keys ``[N, 2]``; ``[N, 4]`` words of 32 random bits."""
    # Both halves of a round at once, [2, N]: NumPy's time goes by the number of calls.
    words = counter.T.astype(np.uint64)
    even, odd = words[::2], words[1::2]
    for round_key in (key.T + _KEY_STEPS_SO_FAR) & _LOW:
        product = (_MULTIPLIERS * even)[::-1]
        even, odd = (product >> _HALF) ^ odd ^ round_key, product & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1).astype(np.uint32)


def uniforms(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, sequence index, token position).

    Args:
        seeds: Any integers; those that agree modulo 2^64 are the same seed.
        indices: Numbers of the samples within their request, below 2^32.
        positions: Positions of the tokens to be drawn, below 2^64.
    """
    seed = np.array([value % 2**64 for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    counter = np.stack([position & _LOW, position >> _HALF, index, np.zeros_like(index)], axis=1)
    key = np.stack([seed & _LOW, seed >> _HALF], axis=1)
    words = philox_4x32(counter.astype(np.uint32), key.astype(np.uint32)).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
