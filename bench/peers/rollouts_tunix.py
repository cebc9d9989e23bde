"""Tunix's RolloutOrchestrator with a model that answers immediately and an environment whose steps sleep; a JSON line.

Its environments are synchronous by contract and run in the event loop's executor, which Python makes with at most 32
threads; `--threads` replaces it by a larger one, as Tunix's own learner does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging as absl_logging
from sleeps import STEPS, Meter, workload_of
from tunix.rl.agentic import utils
from tunix.rl.agentic.agents import model_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.pipeline import rollout_orchestrator
from tunix.rl.rollout import base_rollout

absl_logging.set_verbosity(absl_logging.ERROR)
logging.disable(logging.WARNING)

BATCH = 8
OUTPUT = {
    "text": ["answer"],
    "logits": None,
    "tokens": [np.arange(32)],
    "left_padded_prompt_tokens": np.arange(64)[None],
    "logprobs": [np.zeros(32)],
}


class Sleeping(base_environment.BaseTaskEnv):
    """Answers every action after the seconds given beforehand."""

    def __init__(self, sleeps: Sequence[float], index: int) -> None:
        super().__init__({"question": "q"}, max_steps=STEPS, pair_index=index, group_id=index)
        self._sleeps = sleeps

    def _initial_observation(self) -> dict[str, str]:
        return {"question": "What next?"}

    def _step_impl(self, action: Any) -> Any:
        time.sleep(self._sleeps[self.step_count - 1])
        return base_environment.EnvStepResult("observed", 1.0, self.step_count >= STEPS, {})


class Agent(model_agent.ModelAgent):
    """Tunix's single-turn agent."""


def model_call(messages: Any, env: Any, **_: Any) -> Any:
    """Answer immediately."""
    return base_rollout.RolloutOutput(**OUTPUT)


async def play(table: Sequence[Sequence[float]], slots: int, threads: int) -> int:
    """All episodes; returns how many results came out."""
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(threads))
    orchestrator = rollout_orchestrator.RolloutOrchestrator(
        rollout_sync_lock=utils.RolloutSyncLock(), engine_kwargs={"model_call": model_call}, max_concurrency=slots
    )
    pairs = ((Agent("system"), Sleeping(sleeps, index)) for index, sleeps in enumerate(table))
    producer = asyncio.create_task(
        orchestrator.run_producers_from_stream(pairs, group_size=1, collect_mode="Trajectory")
    )
    await asyncio.sleep(0)
    done = 0
    async for batch in orchestrator.yield_batches(BATCH):
        done += len(batch)
    await producer
    return done


if __name__ == "__main__":
    work, arguments = workload_of(__doc__, lambda parser: parser.add_argument("--threads", type=int, default=256))
    table = work.sleeps()
    with Meter() as meter:
        done = asyncio.run(play(table, work.slots, arguments.threads))
    meter.tell(work, done)
