"""A load on the simulator."""

from __future__ import annotations

from typing import Any

from bench.two_classes.loads import BATCH, URGENT
from bench.two_classes.outcomes import Outcome
from layby.simulate.observations import RequestLog, RequestRecord
from layby.simulate.profiles import Profile
from layby.simulate.settings import scheduler_config
from layby.simulate.simulation import Simulation
from layby.simulate.traces import Trace


class _FullLog(RequestLog):
    """Keeps every record, in the order of their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[RequestRecord] = []

    def finish(self, record: RequestRecord, time_s: float, num_output_tokens: int) -> None:
        super().finish(record, time_s, num_output_tokens)
        self.ended.append(record)


def simulate(trace: Trace, profile: Profile, options: dict[str, Any]) -> Outcome:
    """Play a trace on the profile's machine.

    Args:
        trace: What arrives.
        profile: The machine.
        options: The engine's.
    """
    log = _FullLog()
    config = scheduler_config(profile, max_queue=None, **options)
    simulation = Simulation(trace, profile, config, log=log)
    simulation.run()
    jobs = [record for record in log.ended if record.priority == BATCH]
    num_jobs = sum(request.priority == BATCH for request in trace.requests)
    return Outcome(
        ttfts_s=tuple(
            record.ttft_s
            for record in log.ended
            if record.priority == URGENT and record.ttft_s is not None
        ),
        batch_done_s=max((record.e2e_s or 0.0 for record in jobs), default=0.0),
        moves_per_job=simulation.scheduler.metrics.preemptions / max(1, num_jobs),
        unfinished=num_jobs - len(jobs),
    )
