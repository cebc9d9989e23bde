"""Palestra's embedded engine as a runner of `engine`: loaded as the server loads it, in a process of its own.

python bench/engine_palestra.py --model FOLDER --threads 2 <<< '{"work": "batch 1", "round": 1}'
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import numpy as np
import torch
import uvloop
from engine_work import LONG_REPLY, Prompt, main

from palestra.engine.base import EngineRequest
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.models.device import tune_malloc
from palestra.renderers import select_renderer
from palestra.threads import in_thread
from palestra.types.calls import SamplingParams, TokenSequence

POLICY = "policy"


class PalestraSampler:
    """See `Sampler`."""

    def __init__(self, model: str, threads: int) -> None:
        tune_malloc()
        stops = select_renderer(load_tokenizer(model)).stop_ids
        config = EmbeddedEngineConfig.model_validate({"threads": threads})
        loaded = asyncio.run(in_thread(lambda: load_causal_lm(model, torch.bfloat16)))  # as the server does
        policy = PolicyModel(model=loaded, stop_ids=frozenset(stops))
        self._engine = EmbeddedEngine({POLICY: policy}, config)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._seeds = itertools.count()

    def sample(self, prompts: Sequence[Prompt], samples: int, tokens: int) -> list[Prompt]:
        """See `Sampler`."""

        async def all_replies() -> list[Prompt]:
            calls = [self._reply(prompt, tokens) for prompt in prompts for _ in range(samples)]
            return await asyncio.gather(*calls)

        return self._runner.run(all_replies())

    def first_tokens(self, others: Sequence[Prompt], probes: Sequence[tuple[float, Prompt]]) -> list[float]:
        """See `Sampler`."""
        return self._runner.run(self._probe(others, probes))

    async def _probe(self, others: Sequence[Prompt], probes: Sequence[tuple[float, Prompt]]) -> list[float]:
        begun = [asyncio.Event() for _ in others]
        running = [
            asyncio.create_task(self._reply(prompt, LONG_REPLY, event))
            for prompt, event in zip(others, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        seconds = []
        for gap, prompt in probes:
            await asyncio.sleep(gap)
            arrival = time.perf_counter()
            await self._reply(prompt, 1)
            seconds.append(time.perf_counter() - arrival)
        assert not any(task.done() for task in running), "the others ended too early"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return seconds

    async def _reply(self, prompt: Prompt, tokens: int, begun: asyncio.Event | None = None) -> Prompt:
        """One reply; `begun` is set with its first token."""
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, seed=next(self._seeds))
        ids: Prompt = []
        request = EngineRequest(policy=POLICY, prompt=TokenSequence(np.array(prompt, np.int32)), sampling=sampling)
        async for piece in self._engine.generate(request):
            ids += piece.ids
            if begun is not None:
                begun.set()
        return ids


if __name__ == "__main__":
    main(PalestraSampler)
