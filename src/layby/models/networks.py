"""Which kernels a model runs on, and in which number formats."""

from __future__ import annotations

import logging

import torch

from layby import kernels
from layby.errors import ConfigError
from layby.models import LoadedModel
from layby.models.network import Network

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_VNNI = {"avx512vnni", "avxvnni"}
_NATIVE_BFLOAT16 = {"avx512bf16"}


def resolve_dtype(name: str, device: torch.device) -> str:
    """The number format of weights and activations that ``auto`` or a name means.

    ``auto`` is bfloat16 on a GPU. On a CPU it is int8 where the processor multiplies 8-bit integers
    (VNNI) and the compiled kernels are there, else bfloat16 where it multiplies those, else
    float32.

    Raises:
        ConfigError: There is no such format, or not on this device.
    """
    choices = ("auto", "int8", *DTYPES)
    if name not in choices:
        raise ConfigError(f"dtype must be one of {', '.join(choices)}; got {name!r}")
    if name == "int8" and device.type != "cpu":
        raise ConfigError(f"dtype int8 runs on the CPU only, not on {device.type}")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16"
    if kernels.available() and kernels.features() & _VNNI:
        return "int8"
    return "bfloat16" if kernels.features() & _NATIVE_BFLOAT16 else "float32"


def build_network(
    model: LoadedModel, *, dtype: str, kv_cache_dtype: str, device: torch.device, block_size: int
) -> Network:
    """A model ready to run.

    Args:
        model: From ``load``.
        dtype: As ``resolve_dtype`` gives it.
        kv_cache_dtype: ``auto`` (that of the weights), ``int8``, ``bfloat16`` or ``float32``.
        device: Where it runs. On a CPU the compiled kernels are taken where they can do the model.
        block_size: Slots of a KV block.

    Raises:
        ConfigError: The formats do not go together, or the kernels cannot do this model.
        ModelError: The weights are damaged or do not fit the model's configuration.
    """
    kv_dtype = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    reason = _why_not_compiled(model, dtype, kv_dtype, device, block_size)
    if reason is None:
        return _compiled(model, dtype, kv_dtype)
    if dtype == "int8" or kv_dtype != dtype:
        raise ConfigError(f"dtype {dtype} with a KV cache in {kv_dtype} cannot be had: {reason}")
    from layby.models.transformer import Transformer

    return Transformer(
        model.config, model.weights(DTYPES[dtype]), dtype=DTYPES[dtype], device=device
    )


def _why_not_compiled(
    model: LoadedModel, dtype: str, kv_dtype: str, device: torch.device, block_size: int
) -> str | None:
    if device.type != "cpu":
        return f"the compiled kernels run on the CPU, not on {device.type}"
    if not kernels.available():
        return "this installation lacks the compiled kernels"
    if "float16" in (dtype, kv_dtype):
        return "the compiled kernels have no float16"
    if model.config.head_dim % 16 or model.config.head_dim > 256:
        return (
            f"they need head_dim to be a multiple of 16, 256 at most, not {model.config.head_dim}"
        )
    if block_size % 16:
        return f"they need block_size to be a multiple of 16, not {block_size}"
    return None


def _compiled(model: LoadedModel, dtype: str, kv_dtype: str) -> Network:
    from layby.models import packed_file, rotation, smoothing
    from layby.models.compiled import CompiledTransformer, pack_model

    packed = None
    if dtype == "int8":
        packed = packed_file.read(model.fingerprint, model.config.num_layers)
    if packed is None:
        weights = model.weights(torch.float32)
        if dtype == "int8":
            tokens = model.tokenizer.encode(smoothing.TEXT)
            weights = smoothing.smooth(model.config, weights, tokens)
            weights = rotation.rotate(model.config, weights)
        packed = pack_model(model.config, weights, dtype)
        if dtype == "int8":
            packed_file.save(packed, model.fingerprint)
    return CompiledTransformer(model.config, packed, kv_dtype=kv_dtype)
