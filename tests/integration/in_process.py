"""A job in this process, with an engine of the test's own behind the real data plane on a real port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from palestra.config import PolicyConfig, Roles, dump_config, parse_config
from palestra.engine.fake import FakeEngine
from palestra.errors import CallsRefused
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import Renderer, select_renderer
from palestra.runtime import local
from palestra.runtime.local import local_job
from palestra.runtime.local_job import LocalJob
from palestra.runtime.parts import Parts
from palestra.session import PolicyRuntime, PolicySet
from palestra.store.lifecycle import EpisodeEnd
from palestra.trainer.fake import FakeTrainer
from palestra.types.records import Task, Trajectory

Reply = Callable[[str, int], str]  # (the prompt as text, seed) -> what the model says, without its stop token


class RecordingTrainer(FakeTrainer):
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        super().__init__(2)
        self.rows: list[Any] = []

    async def forward_backward(self, policy, batch, loss, request_id, logprobs=False):
        self.rows += batch
        return await super().forward_backward(policy, batch, loss, request_id, logprobs)


def parts_of(renderer: Renderer, tokenizer: Any, reply: Reply, **engine: Any) -> Parts:
    """A model that says what `reply` tells it, a character at a time: never in the tokens of the tokenizer's choice.

    `engine`: how the fake engine gives it out.
    """

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    def script(prompt_ids: Any, sampling: Any) -> list[int]:
        text = reply(decode(prompt_ids.tolist()), sampling.seed)
        pieces = [tokenizer.encode(character, add_special_tokens=False) for character in text]
        return [token for piece in pieces for token in piece] + [renderer.stop_ids[0]]

    scripted = FakeEngine(script, **engine)
    runtime = PolicyRuntime(
        name="policy", config=PolicyConfig(), renderer=renderer, engine=scripted, grammars=Grammars()
    )
    policies = PolicySet(runtimes={"policy": runtime}, roles=Roles(default="policy"))
    return Parts(engine=scripted, trainer=FakeTrainer(2), policies=policies)


@asynccontextmanager
async def serving(folder: Path, parts: Parts | None = None, **settings: Any) -> AsyncIterator[LocalJob]:
    """A job whose engine is that of `parts`, or the configured one."""
    base = {"run_dir": str(folder), "server": {"port": 0}, "engine": {"kind": "fake"}, "name": "agents"}
    config = parse_config(base | settings)
    (folder / "config.toml").write_text(dump_config(config))
    with pytest.MonkeyPatch.context() as patch:
        if parts is not None:
            runtimes = {
                name: replace(parts.policies.runtime("policy"), config=policy)
                for name, policy in config.policies.items()
            }
            known = replace(parts, policies=PolicySet.of(config, runtimes))
            patch.setattr(local, "build_parts", lambda *_: known)
        async with local_job(config, lambda kind, data: None) as job:
            yield job


@asynccontextmanager
async def episode_of(job: LocalJob) -> AsyncIterator[tuple[openai.AsyncOpenAI, str]]:
    """A client for a claimed ad-hoc episode, and the episode's id."""
    store = job.plane.store
    episode_id = await store.episodes.register_adhoc(Task(task_id="t", data={}), f"r{id(object())}")
    claim = await store.episodes.claim("w", f"c-{episode_id}", None, episode_id)
    assert claim is not None
    key = job.plane.keys.episode_key(episode_id, claim.fence)
    async with openai.AsyncOpenAI(base_url=f"{job.url}/v1", api_key=key, max_retries=0) as client:
        yield client, episode_id
        try:
            await store.episodes.end(episode_id, claim.fence, EpisodeEnd(rewards={"agent": 1.0}))
        except CallsRefused as error:
            await store.episodes.abort(episode_id, claim.fence, str(error), discard=True)


async def trajectory_of(job: LocalJob, episode_id: str) -> Trajectory:
    (trajectory,) = await job.plane.store.calls.trajectories([episode_id])
    return trajectory


def renderer_of(model: str) -> tuple[Renderer, Any]:
    tokenizer = load_tokenizer(model)
    return select_renderer(tokenizer), tokenizer
