"""A scheduler on a hand-wound clock, with a shadow of both KV pools that checks every move."""

from __future__ import annotations

import itertools

from layby.scheduling import (
    KVPlace,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepPlan,
    Tier,
    Transfer,
    TransferEnd,
)


def next_token(tokens: list[int], index: int) -> int:
    """The token that follows, as a pure function of what precedes it: 1 … 97, never 0."""
    return hash((tuple(tokens), index)) % 97 + 1


class KVShadow:
    """What each slot of every pool holds: a digest of all tokens up to its position."""

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.block_size
        self.block_size = size
        self.device: list[list[int | None]] = [[None] * size for _ in range(config.num_blocks)]
        self.swap: list[list[int | None]] = [[None] * size for _ in range(config.num_swap_blocks)]
        self.disk: list[list[int | None]] = [[None] * size for _ in range(config.num_disk_blocks)]
        self.transfers: dict[int, tuple[Transfer, bool]] = {}  # under way; whether to disk
        self.digests: dict[Sequence, list[int]] = {}

    def execute(self, plan: StepPlan) -> list[int]:
        """Move, write, verify that each row finds its whole past, and sample.

        Blocks that the device pool gives up are gone: who reads or writes one fails.
        """
        if plan.num_blocks is not None:
            more = plan.num_blocks - len(self.device)
            self.device += [[None] * self.block_size for _ in range(more)]
        for moves, source, target in (
            (plan.swap_out, self.device, self.swap),
            (plan.relocate, self.device, self.device),
            (plan.swap_in, self.swap, self.device),
            (plan.copy, self.device, self.device),
        ):
            contents = [list(source[move.src]) for move in moves]
            for move, content in zip(moves, contents, strict=True):
                target[move.dst] = content
        if plan.num_blocks is not None:
            del self.device[plan.num_blocks :]
        for transfers, target in ((plan.demote, self.disk), (plan.promote, self.swap)):
            for transfer in transfers:
                for move in transfer.moves:  # until the end, who reads it reads nonsense
                    target[move.dst] = [None] * self.block_size
                self.transfers[transfer.number] = (transfer, target is self.disk)
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

    def pool(self, tier: Tier) -> list[list[int | None]]:
        return {Tier.DEVICE: self.device, Tier.RAM: self.swap, Tier.DISK: self.disk}[tier]

    def end_transfer(self, number: int, fault: str = "") -> TransferEnd:
        """Everything is moved now, so that nobody may have touched it in the meantime."""
        transfer, is_demotion = self.transfers.pop(number)
        source, target = (self.swap, self.disk) if is_demotion else (self.disk, self.swap)
        for move in transfer.moves:
            target[move.dst] = [None] * self.block_size if fault else list(source[move.src])
        return TransferEnd(number, fault)

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
    """Drives one scheduler; ``config`` holds SchedulerConfig fields.

    Attributes:
        ends_transfers: Whether a transfer ends with the step after its own; otherwise
            ``end_transfer`` must be called.
    """

    def __init__(self, **config: object) -> None:
        self.now = 0.0
        self.config = SchedulerConfig(**{"block_size": 16, **config})  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.shadow = KVShadow(self.config)
        self.ends_transfers = True
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

    def restart(
        self, *, keeps_tokens: bool, keeps_kv: bool = False, loses_kv: bool = False
    ) -> dict[str, Request]:
        """Go on with new pools, as another process would; what was live by id.

        With ``keeps_kv`` who has some comes back parked, with ``loses_kv`` to find it unreadable.
        """
        before, old_shadow = self.scheduler, self.shadow
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.shadow = KVShadow(self.config)
        # Whoever gave the pool another size gives the new one what was accepted needs.
        self.scheduler.resize(max(self.config.num_blocks, before.device_pool.limit))
        again = {}
        for old in before.requests.values():
            request = Request(
                old.request_id,
                old.sequences[0].tokens[: old.num_prompt_tokens],
                max_tokens=old.max_tokens,
                n=old.n,
                priority=old.priority,
                arrival_time=old.arrival_time,
                waits_since=self.now - before.waited_s(old),
            )
            if keeps_tokens and old.first_token_time is not None:
                request.continue_from([(s.output_tokens, s.finish_reason) for s in old.sequences])
                request.first_token_time = old.first_token_time
            may_keep = keeps_kv and (keeps_tokens or old.first_token_time is None)
            place = before.locate_kv(old) if may_keep else None
            if place is None or not self._park_again(request, place, old_shadow):
                self.scheduler.add_request(request, was_accepted=True)
            elif loses_kv:
                assert self.scheduler.lose_kv(request.request_id)
            again[old.request_id] = request
        self.scheduler.check_integrity()
        return again

    def _park_again(self, request: Request, before: KVPlace, old_shadow: KVShadow) -> bool:
        """Copy what another process had of a request; False if there is no room."""
        place = self.scheduler.add_parked(request, before.tables)
        if place is None:
            return False
        blocks = zip(before.tables.blocks, place.tables.blocks, strict=True)
        for old_block, block in blocks:
            content = old_shadow.pool(before.tier)[old_block]
            self.shadow.pool(place.tier)[block] = list(content)
        return True

    def step(self) -> StepPlan:
        """One step, one second; everything is checked before and after."""
        self.now += 1.0
        scheduler = self.scheduler
        # What the step does first itself; the second time it changes nothing.
        scheduler._classes.promote(self.now)
        scheduler._classes.demote(scheduler._num_steps + 1)
        ranks = {request: request.rank for request in scheduler.requests.values()}
        oldest = self._oldest()
        newcomer = scheduler.waiting.head
        due = list(self.shadow.transfers) if self.ends_transfers else []
        plan = scheduler.schedule()
        scheduler.check_integrity()
        self.check_plan(plan, oldest, newcomer, ranks)
        self.finished += scheduler.update(plan, self.shadow.execute(plan))
        scheduler.check_integrity()
        for number in due:
            self.end_transfer(number)
        self.plans.append(plan)
        return plan

    def end_transfer(self, number: int, fault: str = "") -> list[Request]:
        """A transfer ends between two steps; returns whose KV is lost by it."""
        lost = self.scheduler.transfers_ended([self.shadow.end_transfer(number, fault)])
        self.scheduler.check_integrity()
        return lost

    def run(self, max_steps: int = 5000) -> list[Request]:
        """Step until nothing is left; returns the finished requests in order of finishing."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {max_steps} steps"
        for number in list(self.shadow.transfers):  # of requests that ended meanwhile
            self.end_transfer(number)
        assert self.scheduler.memory.device.num_held == 0
        assert self.scheduler.memory.disk.num_held == 0
        assert self.scheduler.memory.swap.num_held == 0
        return self.finished

    def _oldest(self) -> Request | None:
        """The oldest of the most urgent class."""
        return min(
            self.scheduler.requests.values(), key=self.scheduler.policy.urgency, default=None
        )

    def check_plan(
        self,
        plan: StepPlan,
        oldest: Request | None,
        newcomer: Request | None,
        ranks: dict[Request, int],
    ) -> None:
        """What the design promises of every step under the default policy.

        ``oldest`` was the most urgent of all and ``newcomer`` the most urgent waiting request
        when the step began; ``ranks`` are those of then.
        """
        scheduler = self.scheduler
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert not scheduler.is_resizing, "a step is enough for another size"
        held = sum(request.num_live_seqs for request in scheduler.running)
        assert held <= self.config.max_num_seqs
        waits_for_disk = scheduler.tiers.num_transfers
        assert plan.scheduled or not scheduler.requests or waits_for_disk, (
            "work is there, and nothing is scheduled"
        )
        if self.config.policy not in ("swapped-first", "recompute-only"):
            return
        preempted = [victim for victim, _ in plan.preempted]
        for request in plan.admitted:
            for parked in scheduler.swapped:
                assert request.claim < parked.rank, "admitted over parked work"
            for other in scheduler.waiting:
                urgency = scheduler.policy.urgency
                # A victim comes to the queue only in this step, maybe to its very front.
                assert urgency(request) < urgency(other) or other in preempted
        for request in plan.resumed:
            assert newcomer is None or request.rank <= newcomer.claim, "resumed over urgent"
        for victim in preempted:
            assert victim is not oldest, "the oldest of the most urgent class is never a victim"
            for request in plan.resumed:
                assert request.rank < ranks[victim], "ping-pong"
        for item in plan.scheduled:
            assert item.sequence.request in scheduler.running


def expected_tokens(prompt: list[int], index: int, count: int) -> list[int]:
    """What a sample would be, had it run alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]
