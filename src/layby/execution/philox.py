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


Words = npt.NDArray[np.uint64]


def philox_4x32(
    counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Encrypt counters ``[N, 4]`` under keys ``[N, 2]``; ``[N, 4]`` words of 32 random bits."""
    words = counter.T.astype(np.uint64)
    even, odd = _encrypt(words[::2], words[1::2], key.T.astype(np.uint64))
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1).astype(np.uint32)


def _encrypt(even: Words, odd: Words, key: Words) -> tuple[Words, Words]:
    """The even and the odd words of the counters, and the keys; ``[2, N]`` all.

    NumPy's time goes by the number of calls, so both halves of a round are done at once.
    """
    for round_key in (key + _KEY_STEPS_SO_FAR) & _LOW:
        product = (_MULTIPLIERS * even)[::-1]
        even, odd = (product >> _HALF) ^ odd ^ round_key, product & _LOW
    return even, odd


def uniforms(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, sequence index, token position).

    Args:
        seeds: Any integers; those that agree modulo 2^64 are the same seed.
        indices: Numbers of the samples within their request, below 2^32.
        positions: Positions of the tokens to be drawn, below 2^64.
    """
    seed = np.array([value % 2**64 for value in seeds], np.uint64)
    even = np.array([positions, indices], np.uint64)
    odd = np.zeros_like(even)
    odd[0] = even[0] >> _HALF
    first, second = _encrypt(even & _LOW, odd, np.array([seed & _LOW, seed >> _HALF]))
    bits: Words = (first[0] << np.uint64(21)) | (second[0] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
