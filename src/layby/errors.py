"""Every error a user of Layby can meet, as one tree.

    LaybyError
    ├── ConfigError              a setting, or a combination of settings, that cannot work
    ├── ModelError               a model that cannot be found, read or run
    │   └── ModelNotFoundError   …because the name leads nowhere
    ├── InvalidRequestError      the request is at fault (HTTP 400); names the parameter
    │   └── BeyondSettingsError  …but with larger settings the engine could serve it
    │       └── RequestTooLargeError …it could never fit in the KV cache, even alone
    ├── QueueFullError           too many requests are queued (HTTP 429); try again later
    ├── RequestFailedError       this one request failed while it ran (HTTP 500)
    └── EngineUnavailableError   the engine takes no work (HTTP 503)
        ├── EngineDrainingError  …because it is shutting down
        ├── RequestKeptError     …for this one request, which waits for another start
        └── EngineDeadError      …because a step failed

The module imports nothing of Layby, so that every layer can raise these. ``counted``, ``shown``
and ``prefixed`` are for their messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

_SHOWN_CHARS = 60
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHOWN_CHARS


class LaybyError(Exception):
    """Base of all errors that Layby raises on purpose."""


class ConfigError(LaybyError, ValueError):
    """A setting, or a combination of settings, cannot work. The message names both."""


class ModelError(LaybyError):
    """A model cannot be read or is of a kind that Layby does not run."""


class ModelNotFoundError(ModelError):
    """A model name leads nowhere. The message lists what was tried."""


class InvalidRequestError(LaybyError, ValueError):
    """A request that can never be served as written.

    ``param`` names the offending parameter in the words of the OpenAI API, or is None when the
    fault is in the request as a whole.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BeyondSettingsError(InvalidRequestError):
    """A request that the engine's settings (context, places, KV cache) are too small for."""


class RequestTooLargeError(BeyondSettingsError):
    """A request whose worst case exceeds the device pool, even with nothing else running.

    ``needed_blocks`` and ``total_blocks`` are the two numbers of the message.
    """

    def __init__(
        self, message: str, *, needed_blocks: int, total_blocks: int, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.needed_blocks = needed_blocks
        self.total_blocks = total_blocks


class QueueFullError(LaybyError):
    """The waiting queue is at its limit; ``retry_after_s`` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(LaybyError):
    """One request failed while it ran; every other request goes on."""


class EngineUnavailableError(LaybyError):
    """The engine accepts no work at present."""


class EngineDrainingError(EngineUnavailableError):
    """The engine is shutting down: it finishes what it accepted and takes nothing new."""


class RequestKeptError(EngineUnavailableError):
    """An earlier process accepted it; this one's settings are too small for it, for ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the request is kept for a start with larger settings")
        self.reason = reason


class EngineDeadError(EngineUnavailableError):
    """A step failed as a whole; what was in flight was failed with this error."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun, in agreement: ``1 token``, ``2 tokens``.

    Args:
        number: How many.
        noun: What, in the singular.
        plural: What, in the plural; the singular with an s if empty.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def sized(num_bytes: int) -> str:
    """An amount of memory as a person reads it: ``1.50 GiB``, and ``4.0 MiB`` below one GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


@contextmanager
def prefixed(what: str, *, when: bool = True) -> Iterator[None]:
    """Put ``what`` in front of the message of an error that is one request's own fault or lot."""
    try:
        yield
    except (InvalidRequestError, QueueFullError) as error:
        if when:
            error.args = (f"{what}: {error}",)
        raise


def shown(value: object) -> str:
    """Any value as a person reads it in an error message: never long, never failing."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = _SHORT_REPR.repr(value)
    except Exception:  # whatever a stranger's repr may raise
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
