"""Which device a model runs on, and in which number format."""

from __future__ import annotations

import torch

from layby.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` means on this machine.

    ``auto`` is a GPU where torch finds one.

    Raises:
        ConfigError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no GPU (is it the CPU build of torch?)")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that ``auto``, ``float32``, ``bfloat16`` or ``float16`` means.

    ``auto`` is bfloat16 on a GPU and float32 on a CPU. A processor with bfloat16 instructions
    would be faster with those, but would then give other tokens than one without.

    Raises:
        ConfigError: There is no such format.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    formats = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in formats:
        raise ConfigError(f"dtype must be auto, {', '.join(formats)}, got {name!r}")
    return formats[name]
