"""Whatever parks, moves, shrinks, fails or restarts, not one bit of an answer changes.

Every case is drawn from its own seed: a few requests, an engine too small for them, and events that
disturb it. What comes out is compared with a run on a pool that has room for everybody.

Forty cases by default; ``make proof`` runs a thousand. A failure names its seed:
``LAYBY_PROOF=1 LAYBY_PROOF_FIRST=17`` runs case 17 alone.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from layby.engine import Engine
from layby.engine.journal import Journal
from layby.engine.journal_records import CallRecord, CallStatus, RequestRecord
from layby.engine.toy import ByteTokenizer
from layby.execution.executor import StepResult
from layby.execution.faults import Faults
from layby.execution.kv_file import KVFile
from layby.execution.torch_executor import TorchExecutor
from layby.models.network import Network
from layby.sampling_params import SamplingParams
from layby.scheduling import Scheduler, SchedulerConfig
from layby.scheduling.plan import StepPlan
from tests.execution.harness import NETWORKS, TINY, make_network, random_weights

COUNT = int(os.environ.get("LAYBY_PROOF", "40"))
FIRST = int(os.environ.get("LAYBY_PROOF_FIRST", "0"))
KINDS = ["torch float32", *(kind for kind in NETWORKS if not kind.startswith("torch"))]
MODEL = replace(
    TINY, vocab_size=ByteTokenizer().vocab_size, hidden_size=64, num_heads=4, head_dim=16
)  # what the compiled kernels can do
MAX_MODEL_LEN = 160
MAX_STEPS = 4000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@cache
def network(kind: str) -> Network:
    return make_network(MODEL, random_weights(MODEL), kind)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps so small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- a case ---


@dataclass(frozen=True)
class Ask:
    """A request: when it comes, and what it asks."""

    step: int
    prompt: list[int]
    params: SamplingParams
    priority: int


@dataclass
class Case:
    """What happens, by step.

    Attributes:
        asks: Requests by name.
        events: Step → what happens before it: ``resize``, ``priority`` or ``abort``.
        restart_step: The process ends before this step, if work is left.
        awaits_disk: Every step waits a moment for the disk, so that transfers are over in time.
        is_killed: It does so without saving anything more.
        keeps_kv: If not, it saves KV as well as tokens.
        faults: As in ``LAYBY_FAULTS``.
    """

    seed: int
    kind: str
    config: SchedulerConfig
    asks: dict[str, Ask]
    events: dict[int, list[str]]
    restart_step: int | None
    is_killed: bool
    keeps_kv: bool
    faults: str
    awaits_disk: bool
    rng: random.Random = field(repr=False)


def draw_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randint(1, 40)
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 5, 40]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.5, 0.4]),
        logit_bias={rng.randrange(97, 123): rng.uniform(-5, 5)} if rng.random() < 0.2 else {},
        seed=rng.choice([None, rng.getrandbits(60)]),
        stop=(chr(rng.randrange(97, 123)),) if rng.random() < 0.2 else (),
        stop_token_ids=(rng.randrange(256),) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
    )


def blocks_of(ask: Ask, block_size: int) -> int:
    """At most so many does it need, were nothing shared."""
    assert ask.params.max_tokens is not None
    return ask.params.n * -(-(len(ask.prompt) + ask.params.max_tokens) // block_size)


def draw_case(seed: int) -> Case:
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    block_size = 16 if kind.startswith("compiled") else rng.choice([4, 8, 16])
    shared = [rng.randrange(256) for _ in range(60)]
    asks = {}
    is_crowd = rng.random() < 0.35  # each more urgent than the one before: most lie on disk
    num_asks = rng.randint(7, 9) if is_crowd else rng.randint(4, 8)
    for number in range(num_asks):
        length = rng.randint(1, 90)
        common = rng.choice([0, 0, min(length - 1, rng.randint(16, 60))])
        prompt = shared[:common] + [rng.randrange(256) for _ in range(length - common)]
        # Who comes late is often urgent: somebody must make room.
        priority = num_asks - number if is_crowd or rng.random() < 0.5 else rng.randint(0, 3)
        params = draw_params(rng)
        if is_crowd:
            params = replace(params, max_tokens=rng.randint(24, 40), min_tokens=0, n=1)
        step = 3 * number if is_crowd else rng.randint(0, 4 * number)
        asks[str(number)] = Ask(step, prompt, params, priority)
    need = max(blocks_of(ask, block_size) for ask in asks.values())
    events: dict[int, list[str]] = {}
    for _ in range(rng.randint(0, 6)):
        event = rng.choice(["resize", "resize", "priority", "priority", "abort"])
        events.setdefault(rng.randint(1, 40), []).append(event)
    num_swap_blocks = rng.choice([0, need // 2, need, need + 2, 2 * need, 4 * need])
    num_disk_blocks = rng.choice([0, need, 6 * need, 6 * need]) if num_swap_blocks else 0
    if is_crowd:
        num_swap_blocks, num_disk_blocks = need + rng.randint(0, 4), 8 * need
    config = SchedulerConfig(
        num_blocks=need + rng.randint(0, need // 3),
        num_swap_blocks=num_swap_blocks,
        num_disk_blocks=num_disk_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice([3, 6, 16]),
        max_num_batched_tokens=rng.choice([16, 40, 128]),
        max_model_len=MAX_MODEL_LEN,
        preemption_mode=rng.choice(["auto", "auto", "swap", "recompute"]),
        policy=rng.choice(["swapped-first"] * 8 + ["running-first", "recompute-only", "reserve"]),
        enable_prefix_caching=rng.random() < 0.6,
        headroom=rng.choice([0, 0, 1]),
        priority_aging=rng.choice([None, None, 10.0]),
        demote_after_tokens=rng.choice([None, None, 6]),
    )
    if is_crowd:
        config = replace(config, preemption_mode="swap", policy="swapped-first", headroom=0)
    faults = ""
    if num_disk_blocks and rng.random() < 0.5:
        faults = rng.choice(
            [
                "disk.read=eio:0.5,disk.write=enospc:0.3",
                "disk.read=corrupt:0.5,disk.read=short:0.3",
                "disk.read=eio:1",
                "disk.write=short:0.5,disk.write=eio:0.2",
            ]
        )
        faults += f",seed={seed}"
    restart_step = rng.randint(1, 30) if rng.random() < 0.5 else None
    is_killed = rng.random() < 0.3
    keeps_kv = rng.random() < 0.85
    if keeps_kv and rng.random() < 0.4:
        faults = faults or f"seed={seed}"
        faults += ",state.read=eio:0.1,state.read=corrupt:0.2,state.write=enospc:0.25"
    return Case(
        seed, kind, config, asks, events, restart_step, is_killed, keeps_kv, faults,
        awaits_disk=rng.random() < 0.7, rng=rng,
    )  # fmt: skip


# --- running it ---


class PatientExecutor(TorchExecutor):
    """Waits for the disk in every step, because a step of this model is shorter than a transfer."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self._disk is not None:
            result.transfer_ends += self._disk.ends(wait_s=0.01)
        return result


class Life:
    """An engine from start to end; a step takes a second of its clock."""

    def __init__(
        self,
        kind: str,
        config: SchedulerConfig,
        swap_dir: Path | None = None,
        faults: str = "",
        *,
        awaits_disk: bool = False,
    ) -> None:
        self.now = 0.0
        executor = (PatientExecutor if awaits_disk else TorchExecutor)(
            network(kind),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_swap_blocks=config.num_swap_blocks,
            num_disk_blocks=config.num_disk_blocks,
            swap_dir=None if swap_dir is None else str(swap_dir),
            faults=Faults.parse(faults),
        )
        for pool in (executor.cache.pool, executor.cache.swap_pool):  # stale reads cannot hide
            pool.fill_(float("nan") if pool.dtype.is_floating_point else 255)
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.engine = Engine(
            self.scheduler,
            executor,
            ByteTokenizer(),
            max_model_len=MAX_MODEL_LEN,
            clock=lambda: self.now,
        )
        self.names: dict[str, str] = {}  # of live requests, by id
        self.records: dict[str, RequestRecord] = {}

    def start(self, name: str, ask: Ask) -> RequestRecord:
        prepared = self.engine.prepare(ask.prompt, ask.params, priority=ask.priority)
        self.names[self.engine.submit(prepared)] = name
        record = RequestRecord.new(list(ask.prompt), prepared.settled_params)
        self.records[name] = record
        return record

    def go_on(self, name: str, record: RequestRecord, priority: int, kept: KVFile | None) -> bool:
        """Take up what an earlier process began; whether it is parked, with its KV."""
        if not record.has_started:
            record = RequestRecord.new(record.prompt, record.params)
        prepared = self.engine.prepare_again(
            record.prompt, record.params, priority=priority, cache_salt="", age_s=self.now,
            outputs=[(list(s.token_ids), s.finish_reason) for s in record.samples]
            if record.has_started else (), kept=kept,
        )  # fmt: skip
        self.names[self.engine.submit(prepared)] = name
        self.records[name] = record
        self.scheduler.check_integrity()
        return prepared.request in self.scheduler.swapped

    def step(self) -> None:
        self.now += 1.0
        for delta in self.engine.step():
            self.records[self.names[delta.request_id]].add(delta)
            if delta.finished:
                assert delta.error is None, delta.error
                del self.names[delta.request_id]
        assert self.engine.error is None, self.engine.error
        self.scheduler.check_integrity()

    def end(self) -> None:
        """All is done: nothing is held anywhere."""
        scheduler = self.scheduler
        assert not self.names
        for pool in (scheduler.device_pool, scheduler.swap_pool, scheduler.disk_pool):
            assert pool.num_held == 0
        self.engine.close()


def undisturbed(kind: str, block_size: int, asks: Iterable[tuple[str, Ask]]) -> Life:
    """Room for everybody, and nothing happens."""
    config = SchedulerConfig(num_blocks=600, block_size=block_size, max_model_len=MAX_MODEL_LEN)
    life = Life(kind, config)
    for name, ask in asks:
        life.start(name, ask)
    while life.engine.has_unfinished:
        life.step()
    assert life.engine.stats().preemptions_swap == life.engine.stats().preemptions_recompute == 0
    life.end()
    return life


class Disturbed:
    """A case on its way.

    Attributes:
        answers: Records of all requests, as a client would have them in the end.
        aborted: Names of those that were aborted.
        reached: How often each kind of disturbance took place.
    """

    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.directory = case, directory
        self.swap_dir = directory if case.config.num_disk_blocks else None
        self.life = self._new_life()
        self.answers: dict[str, RequestRecord] = {}
        self.aborted: set[str] = set()
        self.reached: Counter[str] = Counter()
        self._to_come = dict(case.asks)
        self._calls: dict[str, CallRecord] = {}
        self._journal: Journal | None = None
        if case.restart_step is not None:
            self._journal = Journal(directory / "state")
            self._journal.claim({"model": "tiny"})

    def run(self) -> None:
        for step in range(MAX_STEPS):
            if step == self.case.restart_step:
                self._restart()
            for name, ask in list(self._to_come.items()):
                if ask.step <= step:
                    self._accept(name, ask)
            for event in self.case.events.get(step, ()):
                self._disturb(event)
            if self.life.engine.has_unfinished:
                self.life.step()
                self._save_ended()
            elif not self._to_come:
                break
        else:
            raise AssertionError(f"not finished after {MAX_STEPS} steps")
        self._count()
        self.life.end()
        if self._journal is not None:
            assert not self._journal.unfinished()
            self._journal.close()

    def _new_life(self) -> Life:
        case = self.case
        return Life(
            case.kind, case.config, self.swap_dir, case.faults, awaits_disk=case.awaits_disk
        )

    def _accept(self, name: str, ask: Ask) -> None:
        del self._to_come[name]
        record = self.answers[name] = self.life.start(name, ask)
        if self._journal is not None:
            call = self._calls[name] = CallRecord(
                owner="", call_id=name, is_chosen=True, kind="completion", digest="",
                created_s=0.0, requests=[record], priority=ask.priority,
            )  # fmt: skip
            self._journal.add(call)

    def _disturb(self, event: str) -> None:
        case, rng, engine = self.case, self.case.rng, self.life.engine
        live = sorted(self.life.names.items(), key=lambda item: item[1])
        if event == "resize":
            need = max(blocks_of(ask, case.config.block_size) for ask in case.asks.values())
            low = need if self._to_come else 1  # who comes must find a pool that can hold it
            engine.resize_kv_pool(rng.randint(low, 3 * need))
        elif not live:
            return
        elif event == "priority":
            request_id, name = rng.choice(live)
            priority = rng.randint(0, 4)
            assert engine.set_priority(request_id, priority)
            if self._journal is not None:
                self._journal.set_priority("", name, priority)
        else:
            request_id, name = rng.choice(live)
            delta = engine.abort(request_id)
            assert delta is not None
            self.aborted.add(self.life.names.pop(request_id))
            if self._journal is not None:
                assert self._journal.remove("", name)
                del self._calls[name]
        self.reached[event] += 1

    def _save_ended(self) -> None:
        """What a server writes down: every call that has ended."""
        if self._journal is None:
            return
        live = set(self.life.names.values())
        for name, call in list(self._calls.items()):
            if name not in live:
                call.status = CallStatus.DONE
                self._journal.save(call)
                del self._calls[name]

    def _restart(self) -> None:
        """Another process, with pools of its own, finds what the journal holds."""
        assert self._journal is not None
        if not self.case.is_killed:
            for call in self._calls.values():
                self._journal.save(call)
            if self.case.keeps_kv:
                unfinished_kv = self.life.engine.unfinished_kv()
                saved = unfinished_kv.save(self._journal.kv_path, Faults.parse(self.case.faults))
                self.reached["KV saved"] += saved
                self.reached["KV not saved"] += len(unfinished_kv.places) - saved
        self._count()
        self.life.engine.close()
        self._journal.close()
        journal = self._journal = Journal(self.directory / "state")
        journal.claim({"model": "tiny"})
        life = self.life = self._new_life()
        kept = life.engine.open_kept(journal.kv_path, Faults.parse(self.case.faults))
        unfinished = journal.unfinished()
        assert {call.call_id for call in unfinished} == set(self._calls)
        for name in self.answers.keys() - self._calls.keys() - self.aborted:
            found = journal.find("", name)
            assert found is not None
            [self.answers[name]] = found.requests
        for call in unfinished:
            parked = life.go_on(call.call_id, call.requests[0], call.priority, kept)
            self.reached["KV brought back"] += parked
            self.reached["KV of a prompt brought back"] += (
                parked and not call.requests[0].has_started
            )
            call.requests = [life.records[call.call_id]]
            self.answers[call.call_id] = call.requests[0]
            self._calls[call.call_id] = call
            begun = bool(call.requests[0].samples[0].token_ids)
            self.reached["continued" if begun else "begun anew"] += 1
        if kept is not None:
            self.reached["KV left"] += kept.num_requests
            kept.close()

    def _count(self) -> None:
        stats = self.life.engine.stats()
        for name in (
            "preemptions_swap", "preemptions_recompute", "recomputed_tokens", "swapped_in_blocks",
            "demoted_blocks", "promoted_blocks", "swap_faults", "kv_losses", "promotions",
            "demotions", "prefix_cache_hit_tokens",
        ):  # fmt: skip
            self.reached[name] += getattr(stats, name)


def is_beginning(part: RequestRecord, whole: RequestRecord) -> bool:
    """Whether an aborted answer is the beginning of the whole one."""
    for ours, theirs in zip(part.samples, whole.samples, strict=True):
        count = len(ours.token_ids)
        if ours.token_ids != theirs.token_ids[:count]:
            return False
        if repr(ours.logprobs or []) != repr((theirs.logprobs or [])[:count]):
            return False
    return True


def difference(case: Case, directory: Path, reached: Counter[str]) -> str | None:
    """Run a case; say what went wrong, if anything did."""
    disturbed = Disturbed(case, directory)
    disturbed.run()
    reached += disturbed.reached
    asks = [
        (name, replace(case.asks[name], params=record.params))  # with the seed it was given
        for name, record in disturbed.answers.items()
    ]
    wanted = undisturbed(case.kind, case.config.block_size, asks).records
    for name, answer in disturbed.answers.items():
        if name in disturbed.aborted:
            same = is_beginning(answer, wanted[name])
        else:  # repr tells floats apart to the last bit
            same = repr(answer) == repr(wanted[name])
        if not same:
            return f"request {name}:\n  was    {answer}\n  wanted {wanted[name]}"
    return None


MUST_REACH = (
    "preemptions_swap", "preemptions_recompute", "recomputed_tokens", "swapped_in_blocks",
    "demoted_blocks", "promoted_blocks", "swap_faults", "kv_losses", "promotions", "demotions",
    "resize", "priority", "abort", "continued", "begun anew", "prefix_cache_hit_tokens",
    "KV saved", "KV not saved", "KV brought back", "KV of a prompt brought back",
)  # fmt: skip


def test_no_bit_of_any_answer_changes(tmp_path: Path) -> None:
    reached: Counter[str] = Counter()
    failed: dict[int, str] = {}
    for seed in range(FIRST, FIRST + COUNT):
        directory = tmp_path / str(seed)
        directory.mkdir()
        case = draw_case(seed)
        try:
            wrong = difference(case, directory, reached)
        except Exception as error:
            if COUNT == 1:
                raise
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            failed[seed] = wrong
            print(f"case {seed} differs: {wrong}\n  {case}")
    print(f"{COUNT} cases, {len(failed)} differ; reached: {dict(reached)}")
    assert not failed, f"{len(failed)} of {COUNT} cases differ, of seeds {sorted(failed)}"
    if COUNT >= 40:
        missed = [name for name in MUST_REACH if not reached[name]]
        assert not missed, f"the cases are too tame: none reached {missed}"
