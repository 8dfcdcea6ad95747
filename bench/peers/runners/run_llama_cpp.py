"""Runs a job on llama.cpp, batched by hand: llama-cpp-python's own front serves one at a time.

llama.cpp has no preemption. As many sequences run at a time as fit the pool at their full length,
which is what its own server does with as many slots. All sequences of a job have one length, so a
slot that is given on and a whole group that is replaced come to the same. Each slot has its cells
to itself: in one pool for all, every token would look at everybody's.
"""

from __future__ import annotations

from protocol import Generated, Job, serve

BATCH_TOKENS = 512
"""Most tokens of one call: llama.cpp's own micro-batch."""

CELLS_STEP = 256
"""What llama.cpp rounds the cells of a slot up to."""


class LlamaCppEngine:
    """llama.cpp in this process, its KV cells shared out among the slots."""

    def __init__(self, job: Job) -> None:
        import llama_cpp as cpp

        self.cpp = cpp
        cpp.llama_backend_init()
        cells = -(-job.max_model_len // CELLS_STEP) * CELLS_STEP
        self.slots = max(1, min(job.max_num_seqs, job.kv_tokens // cells))
        self.model = cpp.llama_model_load_from_file(
            job.model.encode(), cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {job.model}")
        params = cpp.llama_context_default_params()
        params.n_ctx = self.slots * cells
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = self.slots
        params.n_threads = params.n_threads_batch = job.threads
        params.kv_unified = False
        self.context = cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.vocab_size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self.model))
        self.batch = cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], output_len: int) -> Generated:
        """Generate, a group of sequences at a time."""
        lengths: list[int] = []
        for first in range(0, len(prompts), self.slots):
            answers = self._group(prompts[first : first + self.slots], output_len)
            lengths += map(len, answers)
            self.cpp.llama_memory_clear(self.cpp.llama_get_memory(self.context), False)
        return Generated(lengths, preemptions=0, recomputed_tokens=0)

    def _group(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while True:
            for first in range(0, len(entries), BATCH_TOKENS):
                for sequence, token in self._decode(entries[first : first + BATCH_TOKENS]):
                    answers[sequence].append(token)
            if len(answers[0]) == output_len:
                return answers
            entries = [
                (answer[-1], len(prompt) + len(answer) - 1, sequence, True)
                for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """One call: (token, position, sequence, ends) in, (sequence, next token) out."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, ends) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = ends
        status = self.cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        ended = [sequence for _, _, sequence, ends in entries if ends]
        if not ended:
            return []
        logits = np.ctypeslib.as_array(
            self.cpp.llama_get_logits(self.context), shape=(len(ended), self.vocab_size)
        )
        return list(zip(ended, logits.argmax(axis=1).tolist(), strict=True))


if __name__ == "__main__":
    serve(LlamaCppEngine)
