"""Searches scheduler settings: one trace is simulated over and over, each time with others.

    result = tune(trace, load_profile("a100-llama3-8b"), parse_slo("ttft_p99<2s"), trials=64)
    print(result.command)

Two things are wanted at once: throughput, in output tokens per second, and little ``excess`` over
the SLO (the largest share of a limit that was taken). What is tried next is chosen by Optuna's
tree-structured Parzen estimator. What is found is then explained by further simulations: settings
that buy nothing go back to their defaults, each of the others is reset alone to see what it bought,
and each number is moved up and down to see whether it stands next to a cliff.

The same seed gives the same result, whatever the number of processes and however often a study is
interrupted: trials are chosen in batches of a fixed size, each by a sampler whose seed is made of
the study's seed and the trial's number, and their outcomes are told in order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from layby.engine.config import EngineConfig
from layby.errors import ConfigError
from layby.simulate.laboratory import Bench, Laboratory, Outcome, leave_out_misfits
from layby.simulate.profiles import MEASURED, Profile
from layby.simulate.search_space import SearchSpace, Settings, Value
from layby.simulate.slo import Slo
from layby.simulate.study import identity_of, opened_study
from layby.simulate.traces import Trace
from layby.simulate.tune_result import (
    Ablation,
    Neighbour,
    Trial,
    TuneResult,
    choose,
    cliffs_between,
    pareto_front,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many simulations of it are done, and of how many."""

BATCH: Final = 8
"""Trials chosen at a time. Fixed, or the number of processes would change what is found; more than
a few are chosen blindly of one another."""

_WORST_EXCESS: Final = 1e9  # told of what misses the SLO by an infinite factor
_NO_LOSS: Final = 0.005  # part of the throughput that a setting must bring to be worth naming
_NO_ROOM: Final = 0.02  # the same for the excess


def tune(
    trace: Trace,
    profile: Profile,
    slo: Slo,
    *,
    fixed: Mapping[str, Any] | None = None,
    trials: int = 64,
    jobs: int = 1,
    seed: int = 0,
    study: Path | None = None,
    search_policy: bool = False,
    progress: Progress | None = None,
) -> TuneResult:
    """Search the settings under which a trace is served best, and explain what is found.

    Args:
        trace: What arrives. Requests that could never be served are left out.
        profile: The machine.
        slo: What is to be met.
        fixed: Scheduler options that are given, and therefore not searched.
        trials: Simulations of the search; the explanation takes some more.
        jobs: Processes. They change how long it takes, nothing else.
        seed: Another one searches elsewhere.
        study: A file that keeps the trials (an Optuna journal). If it is there already, the search
            goes on where it ended.
        search_policy: Search the scheduling policy as well.
        progress: See :data:`Progress`.

    Raises:
        ConfigError: Nothing can be searched, or the file is a study of something else.
        LaybyError: A simulation failed, or the file cannot be used.
    """
    if trials < 1 or jobs < 1:
        raise ConfigError(f"trials and jobs must be at least 1, got {trials} and {jobs}")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be from 0 to {2**32 - 1}, got {seed}")
    begun = time.perf_counter()
    most_samples = max((request.n for request in trace.requests), default=1)
    space = SearchSpace(
        profile,
        fixed,
        most_samples=most_samples,
        several_classes=len({request.priority for request in trace.requests}) > 1,
        search_policy=search_policy,
    )
    trace, misfits = leave_out_misfits(trace, space.base)
    bench = Bench(trace, space.profile, slo)
    tell = progress or (lambda what, done, total: None)
    with (
        opened_study(study, identity_of(bench, space, seed)) as opened,
        Laboratory(bench, jobs) as lab,
    ):
        tried = _search(opened, space, lab, trials, seed, tell)
        front = pareto_front(tried)
        chosen = choose(front)
        settings, outcome, ablations = _explain(space, lab, chosen, tell)
        neighbours = _look_around(space, lab, settings, outcome, tell)
    return TuneResult(
        trace=trace.describe(),
        profile=f"{profile.name}: {profile.model} in {profile.dtype}, {profile.kind}",
        model=_model_to_serve(profile),
        slo=slo,
        seed=seed,
        misfits=misfits,
        trials=tried,
        front=front,
        chosen=chosen,
        settings=settings,
        outcome=outcome,
        flags=space.serve_flags(settings),
        ablations=ablations,
        neighbours=neighbours,
        wall_s=time.perf_counter() - begun,
    )


def _search(
    study: Study,
    space: SearchSpace,
    lab: Laboratory,
    trials: int,
    seed: int,
    progress: Progress,
) -> list[Trial]:
    """Trials until there are so many, those of earlier runs included."""
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(
            {name: _to_optuna(space, name, value) for name, value in space.defaults.items()}
        )
    tried = [_from_study(trial) for trial in _of_state(study, "COMPLETE")]
    for trial in tried:
        lab.remember(space.config(trial.settings), trial.outcome)
    progress("trials", len(tried), trials)
    while len(tried) < trials:
        # Asked for in a run that was interrupted, and not told of.
        asked = [_ask(study, space, seed, trial) for trial in _of_state(study, "RUNNING")]
        end = min(trials, (len(tried) // BATCH + 1) * BATCH)
        asked += [_ask(study, space, seed) for _ in range(len(tried) + len(asked), end)]
        outcomes = lab.run([space.config(settings) for _, settings in asked])
        for (told, settings), outcome in zip(asked, outcomes, strict=True):
            told.set_user_attr("found", {"settings": settings, **outcome.as_dict()})
            study.tell(told, [outcome.throughput, min(outcome.excess, _WORST_EXCESS)])
            tried.append(Trial(told.number, settings, outcome))
            progress("trials", len(tried), trials)
    return tried


def _ask(
    study: Study, space: SearchSpace, seed: int, unfinished: FrozenTrial | None = None
) -> tuple[OptunaTrial, dict[str, Value]]:
    """The next trial, or one that an interrupted run has asked for."""
    import numpy as np
    import optuna

    if unfinished is None:
        known = study.get_trials(deepcopy=False)
        order = sum(trial.state is not optuna.trial.TrialState.WAITING for trial in known)
    else:
        order = unfinished.number
    trial_seed = int(np.random.SeedSequence([seed, order]).generate_state(1)[0])
    # Those that run already count as bad ones, so that a batch spreads out.
    with warnings.catch_warnings():  # older versions call these arguments experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(
            seed=trial_seed, multivariate=True, constant_liar=True
        )
    if unfinished is None:
        trial = study.ask()
    else:
        trial = optuna.trial.Trial(study, unfinished._trial_id)
    settings: dict[str, Value] = {}
    for name, rungs in space.rungs.items():
        if isinstance(rungs[0], str):
            settings[name] = str(trial.suggest_categorical(name, rungs))
        else:
            # By place: the values stand about as far apart as they matter.
            settings[name] = rungs[trial.suggest_int(name, 0, len(rungs) - 1)]
    return trial, space.tidy(settings)


def _to_optuna(space: SearchSpace, name: str, value: Value) -> Value:
    return value if isinstance(value, str) else space.rungs[name].index(value)


def _of_state(study: Study, state: str) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == state]


def _from_study(trial: FrozenTrial) -> Trial:
    found = trial.user_attrs["found"]
    return Trial(trial.number, found["settings"], Outcome.from_dict(found))


def _explain(
    space: SearchSpace, lab: Laboratory, chosen: Trial, progress: Progress
) -> tuple[Settings, Outcome, list[Ablation]]:
    """Reset what buys nothing, then say what each of the others buys.

    "Nothing" is measured against the trial that was chosen, so that many small losses cannot add
    up to a large one.
    """
    settings, outcome = dict(chosen.settings), chosen.outcome
    while True:
        changed = space.changed(settings)
        resets = [space.tidy({**settings, name: space.defaults[name]}) for name in changed]
        # A step's tokens cannot be fewer than its sequences: then there is nothing to reset.
        pairs = [
            (name, reset) for name, reset in zip(changed, resets, strict=True) if reset != settings
        ]
        progress("ablations", 0, len(pairs))
        ablations = []
        outcomes = lab.run([space.config(reset) for _, reset in pairs])
        for (name, reset), found in zip(pairs, outcomes, strict=True):
            ablations.append(Ablation(name, settings[name], reset[name], found))
            progress("ablations", len(ablations), len(pairs))
        harmless = [
            (ablation.outcome.excess, -ablation.outcome.throughput, place)
            for place, ablation in enumerate(ablations)
            if _buys_nothing(chosen.outcome, ablation.outcome)
        ]
        if not harmless:
            return settings, outcome, ablations
        place = min(harmless)[-1]
        settings, outcome = pairs[place][1], ablations[place].outcome


def _buys_nothing(having: Outcome, lacking: Outcome) -> bool:
    return (
        lacking.throughput >= having.throughput * (1 - _NO_LOSS)
        and lacking.excess <= having.excess * (1 + _NO_ROOM)
        and (lacking.met or not having.met)
    )


def _look_around(
    space: SearchSpace,
    lab: Laboratory,
    settings: Settings,
    outcome: Outcome,
    progress: Progress,
) -> list[Neighbour]:
    moves = space.neighbours(settings)
    progress("neighbours", 0, len(moves))
    found = []
    outcomes = lab.run([space.config(moved) for _, moved in moves])
    for (name, moved), there in zip(moves, outcomes, strict=True):
        warnings = cliffs_between(outcome, there)
        found.append(Neighbour(name, settings[name], moved[name], there, warnings))
        progress("neighbours", len(found), len(moves))
    return found


def _model_to_serve(profile: Profile) -> str:
    """The estimates name no model that could be loaded under their name."""
    if profile.kind != MEASURED:
        return "MODEL"
    return "" if profile.model == EngineConfig().model else profile.model
