"""The executor that computes nothing: it moves a clock by what a step would have taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

from layby.execution.executor import BlockFormat, StepResult
from layby.scheduling import Request, Tier, TransferEnd
from layby.scheduling.plan import StepPlan
from layby.scheduling.request import Sequence
from layby.simulate.cost import CostModel, StepLoad
from layby.simulate.observations import RequestRecord
from layby.simulate.traces import TraceRequest

TOKEN = 0
"""What prompts and answers consist of; what they have in common is said by other means."""

STOP_TOKEN = 1
"""What a simulated model samples where an answer ends before ``max_tokens``."""


DISK_PATIENCE_S = 0.01
"""How long a step that computes nothing waits for the disk, as the engine's executor does."""


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


class _Disk:
    """Does one transfer at a time, reads before writes, as the engine's disk does."""

    def __init__(self) -> None:
        # When it was begun, its number, and how long it takes.
        self._reads: deque[tuple[float, int, float]] = deque()
        self._writes: deque[tuple[float, int, float]] = deque()
        self._current: tuple[float, int] | None = None  # when it ends, and its number
        self._free_s = 0.0

    def begin(self, number: int, seconds: float, now: float, *, is_read: bool) -> None:
        """A transfer is handed in."""
        (self._reads if is_read else self._writes).append((now, number, seconds))

    def ends(self, now: float) -> list[int]:
        """The transfers that have ended since this was last asked."""
        ended = []
        while (until := self.next_end_s) is not None and until <= now:
            assert self._current is not None  # it is what ends next
            ended.append(self._current[1])
            self._free_s, self._current = until, None
        return ended

    @property
    def next_end_s(self) -> float | None:
        """When the next transfer ends; None if there is none."""
        if self._current is None:
            queue = self._reads or self._writes
            if not queue:
                return None
            begun_s, number, seconds = queue.popleft()
            self._current = (max(self._free_s, begun_s) + seconds, number)
        return self._current[0]


class SimulatedExecutor:
    """Runs step plans on a virtual clock; see ``Executor``.

    Args:
        cost: How long a step takes.
        clock: The scheduler's.
    """

    def __init__(self, cost: CostModel, clock: VirtualClock) -> None:
        self.cost = cost
        self.clock = clock
        self._disk = _Disk()

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Executor``. What is sampled is known beforehand."""
        began_s = self.clock.now
        self.clock.now += self.cost.step_s(StepLoad.of(plan))
        for transfers, cost, is_read in (
            (plan.promote, self.cost.promote, True),
            (plan.demote, self.cost.demote, False),
        ):
            for transfer in transfers:
                assert cost is not None  # else there is no disk
                seconds = cost.seconds(len(transfer.moves))
                self._disk.begin(transfer.number, seconds, began_s, is_read=is_read)
        ends = self._disk.ends(self.clock.now)
        if not (plan.scheduled or ends) and (next_end_s := self._disk.next_end_s) is not None:
            self.clock.now = min(next_end_s, self.clock.now + DISK_PATIENCE_S)
            ends = self._disk.ends(self.clock.now)
        return StepResult(
            [
                next_token(seq) if seq.stop_token_ids else TOKEN
                for item in plan.scheduled
                for seq in item.samplers
            ],
            transfer_ends=[TransferEnd(number) for number in ends],
        )

    @property
    def block_format(self) -> BlockFormat:
        """See ``Executor``; there is nothing in a block."""
        return BlockFormat("simulated", 0)

    def export_blocks(self, tier: Tier, blocks: SequenceOf[int]) -> memoryview:
        """See ``Executor``."""
        return memoryview(b"")

    def import_blocks(self, tier: Tier, blocks: SequenceOf[int], content: memoryview) -> None:
        """See ``Executor``."""

    def release(self, request_id: str) -> None:
        """See ``Executor``; nothing is kept."""

    def close(self) -> None:
        """See ``Executor``; there is nothing to free."""


def next_token(seq: Sequence) -> int:
    """What the model samples next for a sequence."""
    payload = payload_of(seq.request)
    ends = len(seq.tokens) + 1 >= payload.most_tokens
    return STOP_TOKEN if ends and seq.stop_token_ids else TOKEN
