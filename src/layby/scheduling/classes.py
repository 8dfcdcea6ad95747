"""Classes that change: who waits rises, who has run long sinks, and the caller may decide anew.

Two numbers say where a request stands; both begin at its ``priority``, smaller is more urgent::

    claim = priority + demotions      against others: whom it may park, whose parked work it may
                                      go ahead of
    rank  = claim - classes risen     for itself: its place in a queue, and who may park it

Waiting moves a request to the front and keeps it on the device once it is there; it never pushes
anybody out. With one number for both, those of a class who wait would sooner or later park those
of the same class who run, and be parked by them in turn, for as long as there are more of them
than places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from layby.scheduling.config import SchedulerConfig
from layby.scheduling.metrics import SchedulerMetrics
from layby.scheduling.queues import RequestQueue, Urgency
from layby.scheduling.request import Request, RequestStatus, Sequence

_LONGEST_WAIT_S = 1e9
"""A wait beyond this (30 years: an arrival time on another clock) counts as one of this length."""


class ClassCause(Enum):
    """Why a request's class changed."""

    WAITED = "waited"
    RAN_LONG = "ran long"
    ASKED = "asked for"


class ClassChange(NamedTuple):
    """A request's rank changed."""

    request: Request
    before: int
    after: int
    cause: ClassCause


class Classes:
    """Keeps ``claim`` and ``rank`` of every request, and its place in its queue accordingly.

    Costs nothing while nothing changes: rises are known by their time, demotions of steady decodes
    by their step.

    Args:
        config: ``priority_aging`` and ``demote_after_tokens``; each None switches its part off.
        queues: The queue of every state.
        metrics: Where changes are counted.

    Attributes:
        changes: What changed since the list was last taken.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: Mapping[RequestStatus, RequestQueue],
        metrics: SchedulerMetrics,
    ) -> None:
        self._aging_s = config.priority_aging
        self._long_run_tokens = config.demote_after_tokens
        self._queues = queues
        self._metrics = metrics
        self._rising = RequestQueue(self._next_rise)  # all who wait or are parked
        self._sinking = RequestQueue(lambda request: (self._sinks_in[request], request.order))
        self._sinks_in: dict[Request, int] = {}  # steady decode → step of its demotion
        self.changes: list[ClassChange] = []

    # --- aging ---

    @property
    def next_rise(self) -> float:
        """When time alone changes the class of somebody next, in seconds on the clock; infinity if
        it does not."""
        request = self._rising.head
        return math.inf if request is None else self._next_rise(request)[0]

    def begin_wait(self, request: Request, since: float) -> None:
        """The request waits, or is parked, since that time; what it waited before counts, too."""
        if self._aging_s is not None:
            request.waits_since = since - request.waited_s
            self._rising.add(request)

    def begin_wait_again(self, request: Request, now: float) -> None:
        """The same for a request that goes from the device to the waiting queue.

        It stands there behind nobody of its class who came later, however long those waited:
        its work is lost, its place is not.
        """
        if self._aging_s is None:
            return
        request.waits_since = now - request.waited_s
        for other in self._queues[RequestStatus.WAITING]:  # the first one has waited longest
            if other.claim == request.claim and _came_later(other, request):
                assert other.waits_since is not None  # it waits
                request.waits_since = min(request.waits_since, other.waits_since)
                if other.rank < request.rank:
                    self._rise(request, request.rank - other.rank)
                break
        self._rising.add(request)

    def end_wait(self, request: Request, now: float) -> None:
        """The request goes to the device, or ends; its rank stays as it is."""
        if self._aging_s is not None:
            assert request.waits_since is not None  # it waited
            self._rising.remove(request)
            request.waited_s = self.waited_s(request, now)
            request.waits_since = None

    def waited_s(self, request: Request, now: float) -> float:
        """Seconds that the request has waited since it came into its class by hand, or at all; 0
        where waiting does not count."""
        if request.waits_since is None:
            return request.waited_s
        return max(0.0, now - request.waits_since)

    def promote(self, now: float) -> None:
        """Everybody whose time has come rises."""
        while (request := self._rising.head) is not None and self._next_rise(request)[0] <= now:
            assert self._aging_s is not None  # somebody rises
            assert request.waits_since is not None  # it waits
            self._rising.remove(request)
            request.waits_since = max(request.waits_since, now - _LONGEST_WAIT_S)
            total = int((now - request.waits_since) // self._aging_s)
            queue = self._queues[request.status]
            queue.remove(request)
            # At least one, which division may miss by a hair.
            self._rise(request, max(1, total - (request.claim - request.rank)))
            queue.add(request)
            self._rising.add(request)

    def _next_rise(self, request: Request) -> Urgency:
        assert self._aging_s is not None  # somebody rises
        assert request.waits_since is not None  # it waits
        classes = request.claim - request.rank + 1
        return (request.waits_since + classes * self._aging_s, request.order)

    def _rise(self, request: Request, classes: int) -> None:
        before = request.rank
        request.rank -= classes
        self._metrics.promotions += classes
        self.changes.append(ClassChange(request, before, request.rank, ClassCause.WAITED))

    # --- long runs ---

    def steps_to_demotion(self, last_step: int) -> int | None:
        """Steps that can be taken after ``last_step`` until a steady decode sinks; None: no end."""
        request = self._sinking.head
        return None if request is None else self._sinks_in[request] - last_step - 1

    def book_demotion(self, request: Request, last_step: int) -> None:
        """The request decodes a token in every step after ``last_step``; look at it again when it
        has run long."""
        self.forget_demotion(request)
        if self._long_run_tokens is None:
            return
        sinks_at = request.demoted_at_tokens + self._long_run_tokens
        if sinks_at < request.max_tokens:  # else it ends before
            missing = sinks_at - request.sequences[0].num_output_tokens
            self._sinks_in[request] = last_step + max(0, missing) + 1
            self._sinking.add(request)

    def forget_demotion(self, request: Request) -> None:
        """The request does not go on by itself any more."""
        if request in self._sinks_in:
            self._sinking.remove(request)
            del self._sinks_in[request]

    def demote(self, step: int) -> None:
        """Before this step: every steady decode that has run long sinks."""
        while (request := self._sinking.head) is not None and self._sinks_in[request] <= step:
            self.has_run(request.sequences[0])
            self.book_demotion(request, step - 1)

    def has_run(self, seq: Sequence) -> None:
        """A sequence got tokens; its request sinks if those make it a long run."""
        request = seq.request
        if self._long_run_tokens is None or request.is_finished:
            return
        classes = (seq.num_output_tokens - request.demoted_at_tokens) // self._long_run_tokens
        if classes > 0:
            request.demoted_at_tokens += classes * self._long_run_tokens
            self._metrics.demotions += classes
            self._move(
                request, request.claim + classes, request.rank + classes, ClassCause.RAN_LONG
            )

    # --- by hand ---

    def set_priority(self, request: Request, priority: int, now: float) -> None:
        """Put the request into another class, where it begins anew: what it waited and how long it
        ran count from now on."""
        waits = request.waits_since is not None
        if waits:
            self._rising.remove(request)
            request.waits_since = now
        request.waited_s = 0.0
        request.priority = priority
        # A booked demotion stays: it will be found too early, and booked again.
        request.demoted_at_tokens = max(seq.num_output_tokens for seq in request.sequences)
        self._move(request, priority, priority, ClassCause.ASKED)
        if waits:
            self._rising.add(request)

    def _move(self, request: Request, claim: int, rank: int, cause: ClassCause) -> None:
        queue = self._queues[request.status]
        queue.remove(request)
        self.changes.append(ClassChange(request, request.rank, rank, cause))
        request.claim, request.rank = claim, rank
        queue.add(request)

    # --- looking in ---

    def check_integrity(
        self, requests: Iterable[Request], steady: Iterable[Request], last_step: int
    ) -> None:
        """Verify that classes, queues and bookings agree.

        Args:
            requests: All live ones.
            steady: Those that decode a token in every step after ``last_step``.
            last_step: The last step that was updated.

        Raises:
            AssertionError: They do not.
        """
        for queue in (*self._queues.values(), self._rising, self._sinking):
            queue.check_integrity()
        for request in requests:
            assert request.rank <= request.claim
            assert request.claim >= request.priority
            waits = request.status is not RequestStatus.RUNNING and self._aging_s is not None
            assert (request.waits_since is not None) == waits
            assert not waits or request in self._rising
        steady = set(steady)
        assert steady.issuperset(self._sinks_in)
        assert len(self._sinking) == len(self._sinks_in)
        if self._long_run_tokens is None:
            return
        for request in steady:
            sinks_at = request.demoted_at_tokens + self._long_run_tokens
            if sinks_at < request.max_tokens:
                missing = sinks_at - request.sequences[0].num_output_tokens
                assert self._sinks_in[request] <= last_step + missing + 1, f"{request} sinks late"


def _came_later(one: Request, other: Request) -> bool:
    assert one.arrival_time is not None
    assert other.arrival_time is not None  # both were added
    return (one.arrival_time, one.order) > (other.arrival_time, other.order)
