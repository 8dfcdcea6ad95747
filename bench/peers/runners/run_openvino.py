"""Runs a job on OpenVINO GenAI's continuous batching, from a GGUF file."""

from __future__ import annotations

from protocol import Generated, Job, serve

BLOCK_SIZE = 32
"""What its CPU plugin takes; there is no setting for it."""


class OpenVinoEngine:
    """OpenVINO GenAI in this process."""

    def __init__(self, job: Job) -> None:
        import openvino_genai

        self.config = openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-job.kv_tokens // BLOCK_SIZE)
        scheduler.max_num_seqs = job.max_num_seqs
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            job.model,
            scheduler_config=scheduler,
            device="CPU",
            properties={"INFERENCE_NUM_THREADS": job.threads},
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> Generated:
        """Generate. It tells nothing about preemptions."""
        import numpy as np
        import openvino

        config = self.config()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self.pipeline.generate(tensors, [config] * len(prompts))
        return Generated([len(result.m_generation_ids[0]) for result in results])


if __name__ == "__main__":
    serve(OpenVinoEngine)
