"""Packed weights on disk, so that a start need not dequantise and quantise them again.

One safetensors file per model and precision, mapped and not read. It names the model's fingerprint
and carries a hash of its own content; a file that does not fit, or is damaged, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layby.kernels import Int8Weight
from layby.models.compiled import Layer, PackedModel, Projection
from layby.models.hub import home

Array = NDArray[Any]

_log = logging.getLogger(__name__)

_FORMAT = "3"
"""Changes when the packed weights of a model do: their layout, or what is done before packing."""


def packed_path(fingerprint: str) -> Path:
    """Where the int8 form of a model is kept."""
    return home() / "packed" / f"{fingerprint}-int8-{_FORMAT}.safetensors"


def save(model: PackedModel, fingerprint: str) -> None:
    """Keep an int8 model. A disk that is full or may not be written only costs a log line."""
    from safetensors.numpy import save_file

    path = packed_path(fingerprint)
    tensors: dict[str, Array] = {
        "embedding": model.embedding,
        "final_norm": model.final_norm,
    }
    _put(tensors, "head", model.head)
    for index, layer in enumerate(model.layers):
        prefix = f"layers.{index}"
        for name in ("input_norm", "post_norm", "query_norm", "key_norm"):
            vector = getattr(layer, name)
            if vector is not None:
                tensors[f"{prefix}.{name}"] = vector
        for name in ("qkv", "output", "gate_up", "down"):
            _put(tensors, f"{prefix}.{name}", getattr(layer, name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        try:
            save_file(tensors, temporary)
            digest = _digest(Path(temporary))
            os.replace(temporary, path)
            path.with_suffix(".json").write_text(json.dumps({"blake2b": digest}))
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the packed weights are not kept: %s", error)


def read(fingerprint: str, num_layers: int) -> PackedModel | None:
    """The int8 form of a model, mapped from disk; None if it is not kept or is damaged."""
    path = packed_path(fingerprint)
    try:
        wanted = json.loads(path.with_suffix(".json").read_text())["blake2b"]
        if _digest(path) != wanted:
            _log.warning("%s is damaged and will be made anew", path)
            return None
        tensors = _map(path)
        layers = tuple(
            Layer(
                input_norm=tensors[f"layers.{index}.input_norm"],
                qkv=_get(tensors, f"layers.{index}.qkv"),
                query_norm=tensors.get(f"layers.{index}.query_norm"),
                key_norm=tensors.get(f"layers.{index}.key_norm"),
                output=_get(tensors, f"layers.{index}.output"),
                post_norm=tensors[f"layers.{index}.post_norm"],
                gate_up=_get(tensors, f"layers.{index}.gate_up"),
                down=_get(tensors, f"layers.{index}.down"),
            )
            for index in range(num_layers)
        )
        return PackedModel(
            "int8", tensors["embedding"], layers, tensors["final_norm"], _get(tensors, "head")
        )
    except (OSError, ValueError, KeyError):
        return None


def _put(tensors: dict[str, Array], name: str, projection: Projection) -> None:
    weight = projection.weight
    assert isinstance(weight, Int8Weight)
    tensors[f"{name}.packed"] = weight.packed
    tensors[f"{name}.scale"] = weight.scale
    tensors[f"{name}.size_in"] = np.array([weight.size_in], np.int64)
    if projection.bias is not None:
        tensors[f"{name}.bias"] = projection.bias


def _get(tensors: dict[str, Array], name: str) -> Projection:
    scale = tensors[f"{name}.scale"]
    weight = Int8Weight(tensors[f"{name}.packed"], scale, int(tensors[f"{name}.size_in"][0]))
    return Projection(weight, tensors.get(f"{name}.bias"), len(scale))


def _map(path: Path) -> dict[str, Array]:
    """Arrays over a memory map of the file."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        digest.update(content)
    return digest.hexdigest()
