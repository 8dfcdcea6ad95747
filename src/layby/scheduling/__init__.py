"""The three-queue scheduler, in pure Python: usable alone, without torch or numpy.

from layby.scheduling import Request, Scheduler, SchedulerConfig

scheduler = Scheduler(SchedulerConfig(num_blocks=64, num_swap_blocks=256))
scheduler.add_request(Request("a", prompt=[1, 2, 3], max_tokens=8))
while scheduler.has_unfinished:
    plan = scheduler.schedule()
    scheduler.update(plan, tokens=[7] * plan.num_samples)
"""

from layby.scheduling.blocks import BlockPool, OutOfBlocksError, PoolState
from layby.scheduling.budget import SchedulingBudget
from layby.scheduling.config import SchedulerConfig
from layby.scheduling.costs import Decision, MoveCosts
from layby.scheduling.entry import Fit
from layby.scheduling.kept import KVPlace, KVTables, Tier
from layby.scheduling.memory import KVMemory
from layby.scheduling.metrics import SchedulerMetrics
from layby.scheduling.plan import (
    BlockMove,
    PreemptionMode,
    ScheduledSequence,
    StepPlan,
    Transfer,
    TransferEnd,
)
from layby.scheduling.policy import POLICIES, Phase, Policy, SwappedFirst
from layby.scheduling.queues import RequestQueue
from layby.scheduling.request import (
    FinishReason,
    IllegalTransitionError,
    Request,
    RequestStatus,
    Sequence,
)
from layby.scheduling.scheduler import IdleState, Scheduler

__all__ = [
    "POLICIES",
    "BlockMove",
    "BlockPool",
    "FinishReason",
    "Fit",
    "Decision",
    "IdleState",
    "MoveCosts",
    "IllegalTransitionError",
    "KVMemory",
    "KVPlace",
    "KVTables",
    "OutOfBlocksError",
    "Phase",
    "Policy",
    "PoolState",
    "PreemptionMode",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerMetrics",
    "SchedulingBudget",
    "Sequence",
    "StepPlan",
    "SwappedFirst",
    "Tier",
    "Transfer",
    "TransferEnd",
]
