"""Runs a job on Layby, all settings but the sizes as they come."""

from __future__ import annotations

from protocol import Generated, Job, serve

BLOCK_SIZE = 16


class LaybyEngine:
    """Layby in this process."""

    def __init__(self, job: Job) -> None:
        from layby import LLM

        self.llm = LLM(
            job.model,
            block_size=BLOCK_SIZE,
            num_blocks=-(-job.kv_tokens // BLOCK_SIZE),
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            num_threads=job.threads,
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> Generated:
        """Generate, and report what the totals grew by."""
        from layby import SamplingParams

        before = self.llm.stats()
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, progress=False)
        after = self.llm.stats()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return Generated(
            [len(output.outputs[0].token_ids) for output in outputs],
            preemptions=after.preemptions_swap
            + after.preemptions_recompute
            - before.preemptions_swap
            - before.preemptions_recompute,
            recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        )


if __name__ == "__main__":
    serve(LaybyEngine)
