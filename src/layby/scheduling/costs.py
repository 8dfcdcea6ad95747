"""What it costs to get a victim out of the way and back, by either way."""

from __future__ import annotations

from dataclasses import dataclass

from layby.scheduling.plan import PreemptionMode


@dataclass(frozen=True, slots=True)
class LeavingLoad:
    """What a victim's leaving would take.

    Attributes:
        blocks_out: Blocks to move to the swap pool.
        blocks_in: Blocks to move back: those that nobody else keeps on the device.
        tokens: Positions to compute again instead; what the prefix cache will surely have is
            deducted.
    """

    blocks_out: int
    blocks_in: int
    tokens: int


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What the machine takes for it, as measured.

    Attributes:
        out_s: Seconds to move a block to the swap pool.
        in_s: Seconds to move one back.
        token_s: Seconds to compute a token of a prompt.

    Raises:
        ValueError: One of them is negative or no number.
    """

    out_s: float
    in_s: float
    token_s: float

    def __post_init__(self) -> None:
        for name in ("out_s", "in_s", "token_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number from 0 up, got {value!r}")

    def swap_s(self, load: LeavingLoad) -> float:
        """Seconds to park a victim and bring it back."""
        return self.out_s * load.blocks_out + self.in_s * load.blocks_in

    def recompute_s(self, load: LeavingLoad) -> float:
        """Seconds to compute it again."""
        return self.token_s * load.tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice between the two ways out, with what spoke for it.

    Attributes:
        request_id: The victim.
        mode: The cheaper way.
        swap_s, recompute_s: What either was expected to take, in seconds.
        load: What was to be moved or computed.
    """

    request_id: str
    mode: PreemptionMode
    swap_s: float
    recompute_s: float
    load: LeavingLoad


def decide(request_id: str, load: LeavingLoad, costs: MoveCosts) -> Decision:
    """Take the cheaper way; parking, if both cost the same, since it loses nothing."""
    swap_s, recompute_s = costs.swap_s(load), costs.recompute_s(load)
    mode = PreemptionMode.SWAP if swap_s <= recompute_s else PreemptionMode.RECOMPUTE
    return Decision(request_id, mode, swap_s, recompute_s, load)
