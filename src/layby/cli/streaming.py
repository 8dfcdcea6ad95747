"""One answer, piece by piece as it is generated, that Ctrl-C can break off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from layby.engine import Engine, RequestDelta
from layby.sampling_params import SamplingParams


def stream(
    engine: Engine, prompt: str | Sequence[int], params: SamplingParams
) -> Generator[RequestDelta]:
    """Run one request alone and yield what each step adds to it.

    Leaving the iterator, by ``close`` or by an exception, ends the request.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; between two steps, so that the engine stays usable.
        LaybyError: The request is refused, or failed.
    """
    with _interrupts_held_back() as interrupted:
        request_id = engine.add_request(prompt, params)
        try:
            while True:
                for delta in engine.step():
                    yield delta
                    if delta.error is not None:
                        raise delta.error
                    if delta.finished:
                        return
                if interrupted():
                    raise KeyboardInterrupt
        finally:
            engine.abort(request_id)  # does nothing if it has ended


@contextmanager
def _interrupts_held_back() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed; a second one is not held back."""
    count = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
