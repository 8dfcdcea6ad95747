"""The soak in its short form; ``make soak`` runs the long one."""

from __future__ import annotations

import pytest

from bench import soak


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    report = soak.run(2000)
    print(report.text())
    assert not report.wrong, report.text()
    assert set(report.outcomes) == {"finished", "aborted", "refused"}
    for name in ("preemptions_swap", "swapped_in_blocks", "demoted_blocks", "promoted_blocks"):
        assert report.stats[name] > 0, f"the soak is too tame: {report.stats}"


def test_growth_is_told_from_noise() -> None:
    """What the line is fitted to, and what of it counts."""
    report = soak.Report(rss_kib=[(n, 1000 + 2 * n / 1000) for n in range(5000, 20_000, 100)])
    assert report.slope_kib == pytest.approx(2)
    assert report.growth_kib == pytest.approx(29.8)
