"""The compiled CPU kernels, if this installation has them.

They work on NumPy arrays that the caller owns, contiguous, and release the GIL; a torch CPU tensor
takes part as ``tensor.numpy()``, which shares its memory. An array of another shape or type is
refused with a ``ValueError`` or ``TypeError``.

Every kernel is row-exact: a row's result has the same bits whatever other rows share the call and
however many threads work on it. Those on int8 weights, the norms, the activations and the choice of
tokens give the same bits on every instruction set too.

``M`` is the number of rows (tokens), ``K`` the numbers in each, ``N`` the output channels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

try:
    import layby._kernels as _kernels
    from layby._kernels import AttentionBatch, KvLayout, rope_write
except ImportError as error:
    _missing: str | None = str(error)
else:
    _missing = None

__all__ = [
    "AttentionBatch",
    "Bfloat16Weight",
    "Float32Weight",
    "Int8Weight",
    "KvLayout",
    "add_rms_norm",
    "add_rms_norm_quant",
    "available",
    "available_isas",
    "choose_tokens",
    "features",
    "isa",
    "mix",
    "num_threads",
    "quantise_rows",
    "rope_write",
    "set_isa",
    "set_num_threads",
    "silu_mul",
    "silu_mul_quant",
]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
I8 = NDArray[np.int8]

_log = logging.getLogger(__name__)

_STRIPS = 16
"""As ``kStrips`` in ``csrc/elementwise.h``."""


@cache
def available() -> bool:
    """Whether the kernels can be used here. If not, the first call logs why."""
    if _missing is not None:
        _log.warning(
            "the compiled kernels are missing (%s): slower ones do the work; to build them, "
            "install Layby again where a C++ compiler is found",
            _missing,
        )
    return _missing is None


def features() -> frozenset[str]:
    """Of the processor's abilities, those that kernels ask for, by the compiler's names."""
    return frozenset(_kernels.cpu_features()) if _missing is None else frozenset()


def available_isas() -> list[str]:
    """Instruction sets that this processor runs kernels for, the best one last."""
    return _kernels.available_isas()


def isa() -> str:
    """The instruction set in use."""
    return _kernels.isa()


def set_isa(name: str) -> None:
    """Use one of ``available_isas`` instead of the best. For tests and measurements.

    Raises:
        ValueError: This processor does not have it.
    """
    _kernels.set_isa(name)


def num_threads() -> int:
    """Threads that kernels use, the calling one among them; at first, the cores we may run on."""
    return _kernels.num_threads()


def set_num_threads(count: int) -> None:
    """Use ``count`` threads from now on."""
    _kernels.set_num_threads(count)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix ``[N, K]`` as int8 with one scale per output channel, laid out for the kernels.

    The layout is the same on every machine, so the two arrays can be kept in a file and mapped.

    Attributes:
        packed: uint8, in the order that ``csrc/gemm.h`` draws.
        scale: ``[N]`` float32.
        size_in: K.
    """

    packed: NDArray[np.uint8]
    scale: F32
    size_in: int

    @classmethod
    def quantise(cls, weight: F32) -> Int8Weight:
        """Round ``weight [N, K]`` so that each channel's largest number becomes 127."""
        n, k = weight.shape
        packed = np.empty(_kernels.packed_int8_size(n, k), np.uint8)
        scale = np.empty(n, np.float32)
        _kernels.quantise_weight(weight, packed, scale)
        return cls(packed, scale, k)

    def linear(self, x: I8, x_scale: F32, bias: F32 | None, out: F32) -> None:
        """``out [M, N] = (x [M, K] * x_scale [M]) @ weight.T + bias [N]``; sums are exact."""
        _kernels.linear_int8(x, x_scale, self.packed, self.scale, bias, out)


@dataclass(frozen=True, slots=True)
class Bfloat16Weight:
    """A bfloat16 matrix ``[N, K]``, laid out for the kernels.

    Attributes:
        packed: The numbers' bits as uint16, in the order that ``csrc/gemm.h`` draws.
    """

    packed: NDArray[np.uint16]

    @classmethod
    def pack(cls, bits: NDArray[np.uint16]) -> Bfloat16Weight:
        """Take ``bits [N, K]``, as from ``tensor.view(torch.uint16).numpy()``."""
        packed = np.empty(_kernels.packed_bf16_size(*bits.shape), np.uint16)
        _kernels.pack_bf16(bits, packed)
        return cls(packed)

    def linear(self, x: F32, bias: F32 | None, out: F32) -> None:
        """``out [M, N] = bfloat16(x [M, K]) @ weight.T + bias [N]``, summed in float32."""
        _kernels.linear_bf16(x, self.packed, bias, out)


@dataclass(frozen=True, slots=True)
class Float32Weight:
    """A float32 matrix ``[N, K]``, laid out for the kernels (``csrc/gemm.h``)."""

    packed: F32

    @classmethod
    def pack(cls, weight: F32) -> Float32Weight:
        """Take ``weight [N, K]``."""
        packed = np.empty(_kernels.packed_f32_size(*weight.shape), np.float32)
        _kernels.pack_f32(weight, packed)
        return cls(packed)

    def linear(self, x: F32, bias: F32 | None, out: F32) -> None:
        """``out [M, N] = x [M, K] @ weight.T + bias [N]``."""
        _kernels.linear_f32(x, self.packed, bias, out)


def quantise_rows(x: F32, q: I8, scale: F32) -> None:
    """Round ``x [M, K]`` to ``q [M, K]`` times ``scale [M]``, a row's largest number being 127."""
    _kernels.quantise_rows(x, q, scale)


def add_rms_norm(residual: F32, delta: F32 | None, weight: F32, eps: float, out: F32) -> None:
    """Add ``delta [M, K]``, if any, to ``residual [M, K]``; put its norm into ``out [M, K]``.

    The norm divides a row by its root mean square and multiplies it by ``weight [K]``.
    """
    _kernels.add_rms_norm(residual, delta, weight, eps, out)


def add_rms_norm_quant(
    residual: F32, delta: F32 | None, weight: F32, eps: float, q: I8, scale: F32
) -> None:
    """``add_rms_norm`` with its result rounded to ``q [M, K]`` times ``scale [M]``."""
    _kernels.add_rms_norm_quant(residual, delta, weight, eps, q, scale)


def silu_mul(gate_up: F32, out: F32) -> None:
    """``out [M, K] = silu(gate) * up`` for ``gate_up [M, 2 * K]``, gates first."""
    _kernels.silu_mul(gate_up, out)


def mix(x: F32) -> F32:
    """``x [M, K]`` turned so that a channel far larger than the others is spread over 16.

    It is what ``silu_mul_quant`` does before it rounds, so that the small channels keep their
    precision. The turn is orthonormal and its own inverse: ``mix(x) @ mix(w).T`` is ``x @ w.T``.
    Rows whose K is no multiple of 16 stay as they are.
    """
    rows, width = x.shape
    if width % _STRIPS:
        return x
    signs = np.ones((1, 1), np.float32)
    while len(signs) < _STRIPS:
        signs = np.block([[signs, signs], [signs, -signs]])
    mixed: F32 = (signs / _STRIPS**0.5) @ x.reshape(rows, _STRIPS, width // _STRIPS)
    return mixed.reshape(rows, width)


def silu_mul_quant(gate_up: F32, q: I8, scale: F32) -> None:
    """``mix`` of what ``silu_mul`` gives, rounded to ``q [M, K]`` times ``scale [M]``.

    Overwrites ``gate_up``.
    """
    _kernels.silu_mul_quant(gate_up, q, scale)


def choose_tokens(
    logits: F32,
    temperature: F32,
    top_k: I64,
    top_p: F64,
    min_p: F32,
    uniforms: F64,
    tokens: I64,
    faulty: NDArray[np.bool_],
) -> None:
    """Choose one of ``tokens [R]`` for each row of ``logits [R, vocab]``.

    Temperature, then min-p, then top-k, then top-p on what top-k left. What is left is drawn from
    by inverting its cumulative distribution: in order of token id if neither top-k nor top-p is in
    force, else in order of rank. Equal logits rank by id.

    Args:
        temperature: ``[R]``; below 1e-5 the first of the likeliest tokens is taken.
        top_k: ``[R]``; off if 0, less, or at least the vocabulary.
        top_p: ``[R]``; off if 1 or more. One token is always left.
        min_p: ``[R]`` shares of the largest probability; off if 0 or less.
        uniforms: ``[R]`` in [0, 1): what the cumulative distribution is inverted at.
        tokens: Filled in; 0 in a faulty row.
        faulty: ``[R]``, filled in: whether a row holds a NaN or +inf, or nothing but -inf.
    """
    _kernels.choose_tokens(logits, temperature, top_k, top_p, min_p, uniforms, tokens, faulty)
