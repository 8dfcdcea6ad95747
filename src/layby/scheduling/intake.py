"""What a request must pass before it is queued: it could be served, and there is room to wait."""

from __future__ import annotations

from layby.errors import BeyondSettingsError, QueueFullError, RequestTooLargeError
from layby.scheduling.config import SchedulerConfig
from layby.scheduling.memory import KVMemory
from layby.scheduling.request import Request


class Intake:
    """Refuses requests that can never run, and those for which the queue has no place."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory) -> None:
        self.config = config
        self.memory = memory

    def check_size(self, request: Request) -> None:
        """Refuse what could never be served.

        Raises:
            InvalidRequestError, RequestTooLargeError: As ``Scheduler.add_request``.
        """
        self.check_lengths(request.num_prompt_tokens, request.max_tokens, request.n)

    def check_lengths(self, num_prompt_tokens: int, max_tokens: int, n: int) -> None:
        """The same for a request that has not been made yet: its prompt may be far too long to."""
        config = self.config
        if n > config.max_num_seqs:
            raise BeyondSettingsError(
                f"n is {n}, but at most {config.max_num_seqs} sequences can run",
                param="n",
            )
        length = num_prompt_tokens + max_tokens
        if config.max_model_len is not None and length > config.max_model_len:
            raise BeyondSettingsError(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens {max_tokens} make "
                f"{length}, but a sequence holds at most {config.max_model_len} tokens",
                param="max_tokens",
            )
        needed = self.memory.worst_case(num_prompt_tokens, max_tokens, n)
        num_blocks = self.memory.target_blocks
        if needed > num_blocks:
            samples = f", n {n}" if n > 1 else ""
            raise RequestTooLargeError(
                f"the prompt's {num_prompt_tokens} tokens with max_tokens "
                f"{max_tokens}{samples} need {needed} KV blocks of {config.block_size} "
                f"tokens, but the pool has {num_blocks}",
                needed_blocks=needed,
                total_blocks=num_blocks,
                param="max_tokens",
            )

    def check_queue(self, request: Request, num_queued: int, num_placed: int) -> None:
        """Refuse what exceeds ``max_queue``.

        New requests may fill the free places and, beyond those, the queue; preempted ones do not
        count as queued, they hold a place already.

        Args:
            request: The newcomer.
            num_queued: Samples of requests that were never admitted.
            num_placed: Live sequences of all others.

        Raises:
            QueueFullError: There is no place.
        """
        limit = self.config.max_queue
        if limit is None or num_queued + request.n <= limit:
            return
        free_places = max(0, self.config.max_num_seqs - num_placed)
        if num_queued + request.n > limit + free_places:
            raise QueueFullError(
                f"the queue is full: {num_queued} of at most {limit + free_places} sequences "
                f"wait ({limit} in the queue, {free_places} for free places), and "
                f"{request.n} more cannot"
            )

    def max_output_tokens(self, num_prompt_tokens: int, n: int = 1) -> int:
        """Largest ``max_tokens`` that context and device pool allow; 0 or less if none does."""
        most = self.memory.max_output_tokens(num_prompt_tokens, n)
        if self.config.max_model_len is not None:
            most = min(most, self.config.max_model_len - num_prompt_tokens)
        return most
