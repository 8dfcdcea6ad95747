"""The executor that computes nothing: it moves a clock by what a step would have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from layby.execution.executor import StepResult
from layby.scheduling import Request
from layby.scheduling.plan import StepPlan, TransferEnd
from layby.scheduling.request import Sequence
from layby.simulate.cost import CostModel, MoveCost, StepLoad
from layby.simulate.observations import RequestRecord
from layby.simulate.traces import TraceRequest

TOKEN = 0
"""What prompts and answers consist of; what they have in common is said by other means."""

STOP_TOKEN = 1
"""What a simulated model samples where an answer ends before ``max_tokens``."""


class VirtualClock:
    """Seconds since the simulation began; they pass when somebody says so."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False)
class SimulatedPayload:
    """What the executor and the observer know of a request; it travels with it.

    Attributes:
        most_tokens: Length of a sequence, prompt and answer, at which the model stops.
        record: The life that is being observed.
    """

    most_tokens: int
    record: RequestRecord


class _Content:
    """What the blocks of a simulated request hold, as the trace's prefix ids have it.

    Args:
        number: The request's; what no id covers is its own.
        traced: The request.
        block_size: Tokens of a KV block.
    """

    __slots__ = ("_block_size", "_chain", "_num_shared", "_number", "_tokens_per_id")

    def __init__(self, number: int, traced: TraceRequest, block_size: int) -> None:
        self._number = number
        self._block_size = block_size
        self._tokens_per_id = traced.prefix_block_tokens
        covered = min(traced.num_prompt_tokens, len(traced.prefix) * traced.prefix_block_tokens)
        self._num_shared = covered // block_size
        # Each id together with all before it.
        self._chain = list(accumulate(traced.prefix, lambda before, own: hash((before, own))))

    def addresses(self, sample: int, first: int, last: int) -> Iterable[Hashable]:
        """See ``BlockContent``."""
        size = self._block_size
        for index in range(first, min(last, self._num_shared)):
            part = self._chain[((index + 1) * size - 1) // self._tokens_per_id]
            yield (part, index)
        own = (self._number << 48) + (sample << 32)
        yield from range(own + max(first, self._num_shared), own + last)


def make_request(traced: TraceRequest, record: RequestRecord, block_size: int) -> Request:
    """The scheduler's request for one of a trace, with made-up token ids.

    Raises:
        InvalidRequestError: Its numbers cannot be.
    """
    max_tokens = traced.max_tokens or traced.num_output_tokens
    return Request(
        record.request_id,
        [TOKEN] * traced.num_prompt_tokens,
        max_tokens=max_tokens,
        n=traced.n,
        priority=traced.priority,
        arrival_time=traced.arrival_s,
        stop_token_ids=(STOP_TOKEN,) if max_tokens > traced.num_output_tokens else (),
        content=_Content(record.index, traced, block_size),
        payload=SimulatedPayload(traced.num_prompt_tokens + traced.num_output_tokens, record),
    )


def payload_of(request: Request) -> SimulatedPayload:
    """What ``make_request`` gave the request."""
    payload = request.payload
    assert isinstance(payload, SimulatedPayload)
    return payload


class SimulatedExecutor:
    """Runs step plans on a virtual clock; see ``Executor``.

    Args:
        cost: How long a step takes.
        clock: The scheduler's.
        disk: How long a transfer between RAM and disk takes, either way; no time if None. They are
            done one after another, beside the steps.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock, disk: MoveCost | None = None) -> None:
        self.cost = cost
        self.clock = clock
        self.disk = disk or MoveCost()
        self._disk_free_s = 0.0
        self._transfers: deque[tuple[float, int]] = deque()  # when each ends, and its number

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Executor``. What is sampled is known beforehand."""
        for transfer in (*plan.promote, *plan.demote):
            begin = max(self._disk_free_s, self.clock.now)
            self._disk_free_s = begin + self.disk.seconds(len(transfer.moves))
            self._transfers.append((self._disk_free_s, transfer.number))
        self.clock.now += self.cost.step_s(StepLoad.of(plan))
        if self._transfers and not plan.scheduled:  # nothing to do but to wait for the disk
            self.clock.now = max(self.clock.now, self._transfers[0][0])
        ends = []
        while self._transfers and self._transfers[0][0] <= self.clock.now:
            ends.append(TransferEnd(self._transfers.popleft()[1]))
        return StepResult(
            [
                next_token(seq) if seq.stop_token_ids else TOKEN
                for item in plan.scheduled
                for seq in item.samplers
            ],
            transfer_ends=ends,
        )

    def release(self, request_id: str) -> None:
        """See ``Executor``; nothing is kept."""

    def close(self) -> None:
        """See ``Executor``; there is nothing to free."""


def next_token(seq: Sequence) -> int:
    """What the model samples next for a sequence."""
    payload = payload_of(seq.request)
    ends = len(seq.tokens) + 1 >= payload.most_tokens
    return STOP_TOKEN if ends and seq.stop_token_ids else TOKEN
