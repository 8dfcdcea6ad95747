"""KV that outlives the process: who had some comes back parked, before all new work."""

from __future__ import annotations

import pytest

from layby.errors import InvalidRequestError
from layby.scheduling import KVTables, Request, RequestStatus, Tier
from tests.scheduling.harness import Harness, expected_tokens


def tiny(**config: object) -> Harness:
    return Harness(
        **{"block_size": 4, "num_blocks": 16, "num_swap_blocks": 16, "watermark": 0, **config}
    )


def again(old: Request, **fields: object) -> Request:
    """The request as another process makes it of what was written down."""
    prompt = old.sequences[0].tokens[: old.num_prompt_tokens]
    request = Request(
        old.request_id,
        prompt,
        max_tokens=old.max_tokens,
        n=old.n,
        arrival_time=0.0,
        **fields,  # type: ignore[arg-type]
    )
    if old.sequences[0].num_output_tokens:
        request.continue_from([(s.output_tokens, s.finish_reason) for s in old.sequences])
    return request


def cut_off(harness: Harness, steps: int = 4, **fields: int) -> tuple[Request, KVTables]:
    """A request that an orderly end stops after some steps, and what is kept of it."""
    old = harness.add(**{"p": 10, "o": 12, **fields})
    for _ in range(steps):
        harness.step()
    place = harness.scheduler.locate_kv(old)
    assert place is not None
    return old, place.tables


def test_it_goes_on_where_it_was_and_computes_nothing_again() -> None:
    harness = tiny()
    for _ in range(2):
        harness.add(9, 14)
    requests = harness.add(6, 9, n=2), harness.add(7, 9, priority=1)
    for _ in range(3):
        harness.step()
    lives = harness.restart(keeps_tokens=True, keeps_kv=True)
    assert {request.status for request in lives.values()} == {RequestStatus.SWAPPED}
    harness.run()
    assert harness.scheduler.metrics.recomputed_tokens == 0
    for name in [request.request_id for request in requests]:
        for seq in lives[name].sequences:
            prompt = seq.tokens[: seq.num_prompt_tokens]
            assert seq.output_tokens == expected_tokens(prompt, seq.index, 9)


def test_it_comes_in_before_new_work_and_in_its_order() -> None:
    harness = tiny(num_blocks=6)
    old, kept = cut_off(harness)
    other = tiny(num_blocks=6)
    newcomer = other.add(8, 4, name="new")
    late, early = again(old), again(old)
    late.request_id, late.arrival_time, early.arrival_time = "late", 2.0, 1.0
    for request in (late, early):
        assert other.scheduler.add_parked(request, kept) is not None
    assert list(other.scheduler.swapped) == [early, late]
    plan = other.scheduler.schedule()
    assert plan.resumed == [early]
    assert newcomer.status is RequestStatus.WAITING


def test_a_prompt_that_was_half_computed_goes_on_there() -> None:
    harness = tiny(max_num_batched_tokens=8, max_num_seqs=8)
    old, kept = cut_off(harness, steps=1, p=20, o=3)
    assert kept.computed == (8,)
    other = tiny(max_num_batched_tokens=8, max_num_seqs=8)
    assert other.scheduler.add_parked(again(old), kept) is not None
    [item] = other.scheduler.schedule().scheduled
    assert (item.start, item.num_tokens) == (8, 8)


def test_samples_share_blocks_as_they_did() -> None:
    harness = tiny()
    old, kept = cut_off(harness, n=3)
    held = len(set(kept.tables[0]) & set(kept.tables[1]) & set(kept.tables[2]))
    assert held == 2  # of a prompt of ten tokens
    other = tiny()
    place = other.scheduler.add_parked(again(old), kept)
    assert place is not None
    assert len(place.tables.blocks) == len(kept.blocks) == other.scheduler.swap_pool.num_held
    other.scheduler.check_integrity()


def test_without_room_in_ram_it_lies_on_disk_and_without_any_nothing_has_happened() -> None:
    old, kept = cut_off(tiny())
    other = tiny(num_swap_blocks=5, num_disk_blocks=6)
    tiers = []
    for number in range(3):
        request = again(old)
        request.request_id = str(number)
        place = other.scheduler.add_parked(request, kept)
        tiers.append(place and place.tier)
        other.scheduler.check_integrity()
    assert tiers == [Tier.RAM, Tier.DISK, None]
    assert request.status is RequestStatus.WAITING
    assert request.request_id not in other.scheduler.requests
    other.scheduler.add_request(request, was_accepted=True)


def test_what_ram_could_never_take_back_is_not_put_on_disk() -> None:
    old, kept = cut_off(tiny())
    other = tiny(num_swap_blocks=len(kept.blocks) - 1, num_disk_blocks=50)
    assert other.scheduler.add_parked(again(old), kept) is None


def test_kv_that_cannot_be_read_is_computed_again() -> None:
    old, kept = cut_off(tiny())
    other = tiny()
    request = again(old)
    assert other.scheduler.add_parked(request, kept) is not None
    assert other.scheduler.lose_kv(request.request_id)
    assert other.scheduler.swap_pool.num_held == 0
    other.run()
    seq = request.sequences[0]
    assert seq.output_tokens == expected_tokens(seq.tokens[:10], 0, 12)


def test_a_full_queue_is_not_asked() -> None:
    old, kept = cut_off(tiny())
    other = tiny(max_queue=0, max_num_seqs=1)
    other.add(4, 4, name="new")
    assert other.scheduler.add_parked(again(old), kept) is not None


@pytest.mark.parametrize(
    "kept",
    [
        KVTables((0,), ((),)),
        KVTables((13,), ((0, 1, 2, 3),)),
        KVTables((9,), ((0, 1),)),
        KVTables((9, 9), ((0, 1, 2), (0, 1, 3))),
        KVTables((9,), ()),
    ],
)
def test_what_makes_no_sense_of_the_request_is_refused(kept: KVTables) -> None:
    request = Request("a", range(10), max_tokens=12)
    request.continue_from([([1, 2, 3], None)])
    scheduler = tiny().scheduler
    with pytest.raises(ValueError, match=r"cannot go on|live sequences"):
        scheduler.add_parked(request, kept)
    assert scheduler.swap_pool.num_held == 0
    assert not scheduler.requests


def test_an_id_that_is_taken_is_refused() -> None:
    old, kept = cut_off(tiny())
    other = tiny()
    assert other.scheduler.add_parked(again(old), kept) is not None
    with pytest.raises(InvalidRequestError, match="already being served"):
        other.scheduler.add_parked(again(old), kept)


def test_what_waits_has_nothing_to_keep() -> None:
    harness = tiny(num_blocks=4)
    harness.add(12, 3)
    second = harness.add(12, 3)
    harness.step()
    assert harness.scheduler.locate_kv(second) is None
