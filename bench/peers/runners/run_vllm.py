"""Runs a job on vLLM's CPU build, from a Hugging Face directory in bfloat16."""

from __future__ import annotations

import os

from protocol import Generated, Job, serve

BLOCK_SIZE = 128
"""Its own choice on a CPU, said here because the pool is counted in blocks."""

KV_SPACE_GIB = 4
"""Memory its pool may take, which it asks for even if the number of blocks is given."""


class VllmEngine:
    """vLLM with its engine in a process of its own, as it comes."""

    def __init__(self, job: Job) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_SPACE_GIB)
        from vllm import LLM

        # One block of the pool is vLLM's own.
        blocks = -(-job.kv_tokens // BLOCK_SIZE) + 1
        self.llm = LLM(
            model=job.model,
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=blocks,
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            disable_log_stats=False,
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> Generated:
        """Generate, and report by how much its count of preemptions grew."""
        from vllm import SamplingParams

        before = self._preemptions()
        params = SamplingParams(
            max_tokens=output_len,
            min_tokens=output_len,
            temperature=0.0,
            ignore_eos=True,
            detokenize=True,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return Generated(
            [len(output.outputs[0].token_ids) for output in outputs],
            preemptions=self._preemptions() - before,
        )

    def _preemptions(self) -> int:
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )


if __name__ == "__main__":
    serve(VllmEngine)
