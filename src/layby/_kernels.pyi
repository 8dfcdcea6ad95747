"""What the compiled extension offers (csrc/module.cpp); ``layby.kernels`` explains it.

Every array is contiguous and on the CPU. NumPy arrays cost 0.1 µs each to pass; anything else that
speaks DLPack works too, a torch tensor at 4 µs.
"""

import numpy as np
from numpy import float32, float64, int8, int64, uint8, uint16
from numpy.typing import NDArray

def cpu_features() -> list[str]: ...
def available_isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def shut_down_threads() -> None: ...
def packed_int8_size(n: int, k: int) -> int: ...
def packed_bf16_size(n: int, k: int) -> int: ...
def packed_f32_size(n: int, k: int) -> int: ...
def quantise_weight(
    w: NDArray[float32], packed: NDArray[uint8], scale: NDArray[float32]
) -> None: ...
def pack_bf16(w: NDArray[uint16], packed: NDArray[uint16]) -> None: ...
def pack_f32(w: NDArray[float32], packed: NDArray[float32]) -> None: ...
def linear_int8(
    x: NDArray[int8],
    x_scale: NDArray[float32],
    w: NDArray[uint8],
    w_scale: NDArray[float32],
    bias: NDArray[float32] | None,
    out: NDArray[float32],
) -> None: ...
def linear_bf16(
    x: NDArray[float32],
    w: NDArray[uint16],
    bias: NDArray[float32] | None,
    out: NDArray[float32],
) -> None: ...
def linear_f32(
    x: NDArray[float32],
    w: NDArray[float32],
    bias: NDArray[float32] | None,
    out: NDArray[float32],
) -> None: ...
def quantise_rows(x: NDArray[float32], q: NDArray[int8], scale: NDArray[float32]) -> None: ...
def add_rms_norm(
    residual: NDArray[float32],
    delta: NDArray[float32] | None,
    weight: NDArray[float32],
    eps: float,
    out: NDArray[float32],
) -> None: ...
def add_rms_norm_quant(
    residual: NDArray[float32],
    delta: NDArray[float32] | None,
    weight: NDArray[float32],
    eps: float,
    q: NDArray[int8],
    scale: NDArray[float32],
) -> None: ...
def silu_mul(gate_up: NDArray[float32], out: NDArray[float32]) -> None: ...
def silu_mul_quant(
    gate_up: NDArray[float32], q: NDArray[int8], scale: NDArray[float32]
) -> None: ...
def exp(x: NDArray[float32], out: NDArray[float32]) -> None: ...
def choose_tokens(
    logits: NDArray[float32],
    temperature: NDArray[float32],
    top_k: NDArray[int64],
    top_p: NDArray[float64],
    min_p: NDArray[float32],
    uniforms: NDArray[float64],
    tokens: NDArray[int64],
    faulty: NDArray[np.bool_],
) -> None: ...

class KvLayout:
    """Where things lie in a pool of KV blocks; ``csrc/attention.h`` draws it."""

    def __init__(
        self, dtype: str, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> None: ...
    @property
    def block_bytes(self) -> int: ...

class AttentionBatch:
    """What all layers of one step share: who attends to what."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_heads: int,
        num_blocks: int,
        first_rows: NDArray[np.int32],
        num_rows: NDArray[np.int32],
        starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> None: ...
    def attend(
        self,
        pool: NDArray[np.uint8],
        layer: int,
        queries: NDArray[np.generic],
        query_scales: NDArray[np.float32] | None,
        out: NDArray[np.float32],
    ) -> None: ...

def rope_write(
    layout: KvLayout,
    pool: NDArray[np.uint8],
    layer: int,
    qkv: NDArray[np.float32],
    positions: NDArray[np.int64],
    cos_sin: NDArray[np.float32],
    slots: NDArray[np.int64],
    queries: NDArray[np.generic],
    query_scales: NDArray[np.float32] | None = None,
    query_norm: NDArray[np.float32] | None = None,
    key_norm: NDArray[np.float32] | None = None,
    norm_eps: float = 0.0,
) -> None: ...
