"""Sessions without feedback: the judge of the job scores a share of them, so that they can be trained."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from palestra.config import JudgeAccess, JudgeConfig
from palestra.envs.judge import JudgedGroup, last_speakers, weighted_share
from palestra.errors import PalestraError
from palestra.learner import OpenRun
from palestra.server import DataPlane
from palestra.threads import on_loop, own_loop

log = logging.getLogger("palestra.live")
AT_ONCE = 16  # sessions that are judged at the same time


def judge_access(run: OpenRun, plane: DataPlane) -> JudgeAccess:
    """Return what a judge of a live run may use."""
    return JudgeAccess(
        url=f"http://127.0.0.1:{run.config.server.port}",
        key=lambda: plane.keys.playground_key,
        frozen=run.config.frozen_policies,
        meter=None if run.metering is None else run.metering.server("judge", "judge"),
        pictures=run.store.pictures.get,
    )


class SessionJudge:
    """Scores sessions by their calls."""

    def __init__(
        self, run: OpenRun, plane: DataPlane, config: JudgeConfig, share: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Make the judge, which runs on `loop`. Raises ConfigError: it can't be made."""
        self._run, self._config, self._share, self._loop = run, config, share, loop
        self._judge = config.make(judge_access(run, plane))
        self._opening, self._is_open = asyncio.Lock(), False
        self._room = asyncio.Semaphore(AT_ONCE)

    def draws(self, session: str) -> bool:
        """Return whether a session is one of the share that is judged; the same after a restart."""
        return random.Random(f"{self._run.config.seed} {session}").random() < self._share

    async def score(self, row: Mapping[str, Any]) -> float | None:
        """Return the score of a session (`row` of the store), from 0 to 1; None: there is no verdict."""
        try:
            await self._open()
            async with self._room:
                (trajectory,) = await self._run.store.calls.trajectories([row["episode_id"]])
                if not trajectory.chats:
                    return None
                episode = trajectory.episode
                group = JudgedGroup(
                    kind=episode.kind,
                    group_index=episode.group_index,
                    trajectories=(trajectory,),
                    waiting=frozenset({episode.episode_id}),
                    seed=self._run.config.seed,
                    judged=last_speakers([trajectory], self._run.config.players),
                )
                found = await on_loop(self._loop, self._judge.judge(group, self._run.store.verdicts))
        except PalestraError as error:
            log.warning("session %s is not judged: %s", row["session_id"], error)
            return None
        given = found.get(episode.episode_id)
        return None if given is None else weighted_share(given, self._config.reward_weights)

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._run.sampling.wait()  # a policy that judges does not answer before
                for text in await on_loop(self._loop, self._judge.open()):
                    await self._run.event("judge_doubtful", {"text": text})
                self._is_open = True

    async def close(self) -> None:
        """Close the judge's connections."""
        await on_loop(self._loop, self._judge.close())


@asynccontextmanager
async def session_judge(
    run: OpenRun, plane: DataPlane, config: JudgeConfig, share: float
) -> AsyncIterator[SessionJudge]:
    """Judge sessions while the block is open."""
    with own_loop("palestra-judge") as loop:
        judge = SessionJudge(run, plane, config, share, loop)
        try:
            yield judge
        finally:
            await judge.close()
