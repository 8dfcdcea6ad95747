"""Which device a model runs on."""

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
