"""vLLM's CPU build as a runner of `engine`: its offline `LLM` class, in one process, with prompts as token ids.

In its favour: no HTTP and no second process between it and the clock, no text is made of tokens, no logprobs are asked
for (Palestra always computes those of what it samples), requests have no seeds, and its prefix cache is on.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from engine_work import LONG_REPLY, MAX_CONTEXT, Prompt, main

MOST_SEQUENCES = 64  # as Palestra's max_batch
CACHE_GIB = "4"


class VllmSampler:
    """See `Sampler`."""

    def __init__(self, model: str, threads: int) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=CACHE_GIB,
            VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            HF_HUB_OFFLINE="1",
        )
        import vllm  # reads the variables above

        self._vllm: Any = vllm
        self._llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_CONTEXT,
            max_num_seqs=MOST_SEQUENCES,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._names = itertools.count()

    def sample(self, prompts: Sequence[Prompt], samples: int, tokens: int) -> list[Prompt]:
        """See `Sampler`."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._llm.generate(asked, self._sampling(tokens, samples), use_tqdm=False)
        return [list(reply.token_ids) for one in done for reply in one.outputs]

    def first_tokens(self, others: Sequence[Prompt], probes: Sequence[tuple[float, Prompt]]) -> list[float]:
        """See `Sampler`. A probe arrives while a step is computed, and is taken up by the next, as in a server."""
        running = {self._add(prompt, LONG_REPLY) for prompt in others}
        begun: set[str] = set()
        while begun != running:
            begun |= self._step()
        seconds = []
        for gap, prompt in probes:
            arrival = time.perf_counter() + gap
            while time.perf_counter() < arrival:
                self._step()
            probe = self._add(prompt, 1)
            while probe not in (answered := self._step()):
                pass
            seconds.append(time.perf_counter() - arrival)
            assert answered >= running, "the others ended too early"
        self._llm.llm_engine.abort_request(list(running))
        while self._llm.llm_engine.has_unfinished_requests():
            self._step()
        return seconds

    def _sampling(self, tokens: int, samples: int = 1) -> Any:
        return self._vllm.SamplingParams(
            n=samples, temperature=1.0, min_tokens=tokens, max_tokens=tokens, detokenize=False
        )

    def _add(self, prompt: Prompt, tokens: int) -> str:
        name = f"r{next(self._names)}"
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(tokens))
        return name

    def _step(self) -> set[str]:
        """One step of the engine; the names of those that got a token."""
        return {out.request_id for out in self._llm.llm_engine.step() if out.outputs[0].token_ids}


if __name__ == "__main__":
    main(VllmSampler)
