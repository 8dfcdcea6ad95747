"""Seconds that the device spends on something."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Stopwatch:
    """Adds up what is done inside ``with`` blocks, one after another.

    On a GPU the time is the device's: from when it has come so far to when it goes on, whatever it
    waits for in between. So it is known only later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._laps: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._laps.append((self._begun, self._now()))

    def seconds(self) -> float:
        """Their sum; waits for the device to have done them."""
        if not self._on_gpu:
            return float(sum(end - begin for begin, end in self._laps))
        for _, end in self._laps:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._laps)) / 1e3

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
