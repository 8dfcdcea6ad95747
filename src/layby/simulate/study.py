"""The file that keeps the trials of a search, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import layby
from layby.errors import ConfigError, LaybyError
from layby.simulate.laboratory import Bench
from layby.simulate.search_space import SearchSpace

if TYPE_CHECKING:
    from optuna import Study

logger = logging.getLogger("layby.simulate")

_STUDY: Final = "layby tune"
_IDENTITY: Final = "searches"
_JOURNAL: Final = b'{"op_code":'  # how its first line begins
_DIRECTIONS: Final[tuple[Literal["maximize"], Literal["minimize"]]] = ("maximize", "minimize")


def identity_of(bench: Bench, space: SearchSpace, seed: int) -> dict[str, str]:
    """What a study is of: it can go on only with all of it the same."""
    return {
        "trace": _digest(
            [tuple(_numbers(each)) for each in (*bench.trace.requests, *bench.trace.resizes)]
        ),
        "profile": _digest(bench.profile.as_dict()),
        "slo": str(bench.slo),
        "settings": _digest([asdict(space.base), space.rungs]),
        "seed": str(seed),
        "version": layby.__version__,
    }


def _numbers(part: object) -> Iterator[object]:
    for each in fields(part):  # type: ignore[arg-type]
        yield getattr(part, each.name)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@contextmanager
def opened_study(path: Path | None, identity: Mapping[str, str]) -> Iterator[Study]:
    """A study in memory, or in a file which no other process may use meanwhile.

    Raises:
        ConfigError: The file is no study, or one of something else.
        LaybyError: It cannot be used.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if path is None:
        yield optuna.create_study(directions=_DIRECTIONS)
        return
    import fcntl

    try:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LaybyError(f"the study {path} is in use by another run") from None
            _cut_torn_line(path)
            yield _load_study(path, identity)
    except OSError as error:
        raise LaybyError(f"cannot use the study {path}: {error.strerror or error}") from error


def _cut_torn_line(path: Path) -> None:
    """Take off a last line that a full disk or a power cut has left half: what is appended behind
    it would be part of it, and the study lost. Its trial is done again."""
    with path.open("r+b") as file:
        if file.read(len(_JOURNAL)) != _JOURNAL:  # nothing that layby tune has written
            return
        file.seek(0)
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        torn = file.seek(0, os.SEEK_END) - whole
        if torn:
            file.truncate(whole)
            logger.warning("the study %s ended in half a line: %d bytes cut off", path, torn)


def _load_study(path: Path, identity: Mapping[str, str]) -> Study:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    with path.open("rb") as file:
        first = file.readline(len(_JOURNAL))
    if first and first != _JOURNAL:  # before anything is appended
        raise ConfigError(f"{path} is not a study that layby tune has written")
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name=_STUDY, directions=_DIRECTIONS, load_if_exists=True
        )
        known = study.user_attrs.get(_IDENTITY)
        if known is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(_IDENTITY, dict(identity))
            return study
        differing = [name for name in identity if (known or {}).get(name) != identity[name]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a study that layby tune has written") from None
    if differing:
        raise ConfigError(
            f"the study {path} was begun with {_and(differing)} other than now; "
            "name another file, or remove it to begin anew"
        )
    return study


def _and(words: Sequence[str]) -> str:
    said = {"slo": "an SLO", "settings": "settings"}
    named = [said.get(word, f"a {word}") for word in words]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
