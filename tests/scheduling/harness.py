"""A scheduler on a hand-wound clock, with a shadow of both KV pools that checks every move."""

from __future__ import annotations

import itertools

from layby.scheduling import Request, Scheduler, SchedulerConfig, Sequence, StepPlan


def next_token(tokens: list[int], index: int) -> int:
    """The token that follows, as a pure function of what precedes it: 1 … 97, never 0."""
    return hash((tuple(tokens), index)) % 97 + 1


class KVShadow:
    """What each slot of both pools holds: a digest of all tokens up to its position."""

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.block_size
        self.block_size = size
        self.device: list[list[int | None]] = [[None] * size for _ in range(config.num_blocks)]
        self.swap: list[list[int | None]] = [[None] * size for _ in range(config.num_swap_blocks)]
        self.digests: dict[Sequence, list[int]] = {}

    def execute(self, plan: StepPlan) -> list[int]:
        """Move, write, verify that each row finds its whole past, and sample."""
        for moves, source, target in (
            (plan.swap_out, self.device, self.swap),
            (plan.swap_in, self.swap, self.device),
            (plan.copy, self.device, self.device),
        ):
            contents = [list(source[move.src]) for move in moves]
            for move, content in zip(moves, contents, strict=True):
                target[move.dst] = content
        for item in plan.scheduled:
            digests = self._digests(item.sequence)
            for position in range(item.start, item.start + item.num_tokens):
                place, slot = divmod(position, self.block_size)
                self.device[item.sequence.block_table[place]][slot] = digests[position]
        tokens = []
        for item in plan.scheduled:
            self._verify(item.sequence, item.start + item.num_tokens)
            tokens += [next_token(item.sequence.tokens, seq.index) for seq in item.samplers]
        return tokens

    def _digests(self, seq: Sequence) -> list[int]:
        """One digest per token; each covers everything before it."""
        digests = self.digests.setdefault(seq, [])
        for token in seq.tokens[len(digests) :]:
            digests.append(hash((digests[-1] if digests else seq.request.salt, token)))
        return digests

    def _verify(self, seq: Sequence, num_positions: int) -> None:
        digests = self._digests(seq)
        for place in range(-(-num_positions // self.block_size)):
            first = place * self.block_size
            wanted = digests[first : min(first + self.block_size, num_positions)]
            found = self.device[seq.block_table[place]][: len(wanted)]
            assert found == wanted, f"{seq}: block {place} of its table holds other KV"


class Harness:
    """Drives one scheduler; ``config`` holds SchedulerConfig fields."""

    def __init__(self, **config: object) -> None:
        self.now = 0.0
        self.config = SchedulerConfig(**{"block_size": 16, **config})  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.shadow = KVShadow(self.config)
        self.finished: list[Request] = []
        self.plans: list[StepPlan] = []
        self._ids = itertools.count(1)

    def add(self, p: int, o: int, n: int = 1, *, name: str = "", **fields: object) -> Request:
        """Add a request of ``p`` prompt tokens that differ from every other's."""
        number = next(self._ids)
        prompt = fields.pop("prompt", None) or [number * 1000 + i for i in range(p)]
        request = Request(name or f"R{number}", prompt, max_tokens=o, n=n, **fields)  # type: ignore[arg-type]
        self.scheduler.add_request(request)
        return request

    def restart(self, *, keeps_tokens: bool) -> dict[str, Request]:
        """Go on with new, empty pools, as another process would; what was live by id."""
        before = self.scheduler
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.shadow = KVShadow(self.config)
        again = {}
        for old in before.requests.values():
            request = Request(
                old.request_id,
                old.sequences[0].tokens[: old.num_prompt_tokens],
                max_tokens=old.max_tokens,
                n=old.n,
                priority=old.priority,
                arrival_time=old.arrival_time,
            )
            if keeps_tokens and old.first_token_time is not None:
                request.continue_from([(s.output_tokens, s.finish_reason) for s in old.sequences])
                request.first_token_time = old.first_token_time
            self.scheduler.add_request(request, was_accepted=True)
            again[old.request_id] = request
        self.scheduler.check_integrity()
        return again

    def step(self) -> StepPlan:
        """One step, one second; everything is checked before and after."""
        self.now += 1.0
        scheduler = self.scheduler
        oldest = self._oldest()
        newcomer = scheduler.waiting.head
        plan = scheduler.schedule()
        scheduler.check_integrity()
        self.check_plan(plan, oldest, newcomer)
        self.finished += scheduler.update(plan, self.shadow.execute(plan))
        scheduler.check_integrity()
        self.plans.append(plan)
        return plan

    def run(self, max_steps: int = 5000) -> list[Request]:
        """Step until nothing is left; returns the finished requests in order of finishing."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {max_steps} steps"
        assert self.scheduler.memory.device.num_held == 0
        assert self.scheduler.memory.swap.num_held == 0
        return self.finished

    def _oldest(self) -> Request | None:
        """The oldest of the most urgent class."""
        return min(
            self.scheduler.requests.values(), key=self.scheduler.policy.urgency, default=None
        )

    def check_plan(self, plan: StepPlan, oldest: Request | None, newcomer: Request | None) -> None:
        """What the design promises of every step under the default policy.

        ``oldest`` was the most urgent of all and ``newcomer`` the most urgent waiting request
        when the step began.
        """
        scheduler = self.scheduler
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        held = sum(request.num_live_seqs for request in scheduler.running)
        assert held <= self.config.max_num_seqs
        assert plan.scheduled or not scheduler.requests, "work is there, and nothing is scheduled"
        if self.config.policy not in ("swapped-first", "recompute-only"):
            return
        for request in plan.admitted:
            for parked in scheduler.swapped:
                assert request.priority < parked.priority, "admitted over parked work"
            for other in scheduler.waiting:
                assert scheduler.policy.urgency(request) < scheduler.policy.urgency(other)
        for request in plan.resumed:
            assert newcomer is None or request.priority <= newcomer.priority, "resumed over urgent"
        for victim, _ in plan.preempted:
            assert victim is not oldest, "the oldest of the most urgent class is never a victim"
            for request in plan.resumed:
                assert request.priority < victim.priority, "ping-pong"
        for item in plan.scheduled:
            assert item.sequence.request in scheduler.running


def expected_tokens(prompt: list[int], index: int, count: int) -> list[int]:
    """What a sample would be, had it run alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]
