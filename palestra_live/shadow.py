"""The shadow: a candidate answers logged prompts, and a judge compares its replies with the live version's."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from palestra.config import JudgeConfig
from palestra.engine.base import EngineRequest
from palestra.envs.judge import JudgedGroup
from palestra.learner import OpenRun
from palestra.server import DataPlane
from palestra.threads import on_loop, own_loop
from palestra.types.calls import Chat, TokenSequence
from palestra.types.records import Trajectory, Verdict, VerdictKey
from palestra.waiting import LoggedOnce, together
from palestra_live.gate.ledger import GateLedger
from palestra_live.gate.machine import Gate
from palestra_live.gate.records import Compared, Observation, VersionStage
from palestra_live.gate.routing import canary_user
from palestra_live.judged import judge_access
from palestra_live.store import LiveStore

log = logging.getLogger("palestra.live")
AT_ONCE = 8  # prompts that a candidate answers at the same time
WAIT_SECONDS = 1.0  # for more sessions, or for another candidate
NEW = "candidate"


class NoBook:
    """Keeps no verdicts: the gate keeps what follows from them. See `VerdictBook`."""

    async def known(self, key: VerdictKey) -> Verdict | None:
        """Return None."""
        return None

    async def record(self, key: VerdictKey, verdict: Verdict) -> None:
        """Keep nothing."""


class Shadow:
    """Compares the version in the shadow with the live one: one reply of each user who consents, at most once."""

    def __init__(
        self, run: OpenRun, plane: DataPlane, store: LiveStore, ledger: GateLedger, config: JudgeConfig
    ) -> None:
        """Make the judge. Raises ConfigError: it can't be made."""
        self._run, self._store, self._ledger, self._compares = run, store, ledger, config.compares or ""
        (self._policy,) = run.policies.trained
        self._compared: tuple[int, int] | None = None  # what the following is of: the version, and the live one
        self._waiting: dict[str, Mapping[str, Any]] = {}  # the newest session of each user, by the observation's key
        self._told, self._after = set[str](), 0.0
        self._judge = config.make(judge_access(run, plane))

    async def run(self) -> NoReturn:
        """Compare until cancelled."""
        await self._run.sampling.wait()  # a policy that judges does not answer before
        trouble = LoggedOnce(log, "the shadow can't go on now")
        with own_loop("palestra-shadow") as loop:
            try:
                opened = False
                while True:
                    compared = 0
                    with trouble.attempt():
                        if not opened:
                            for text in await on_loop(loop, self._judge.open()):
                                await self._run.event("judge_doubtful", {"text": text})
                            opened = True
                        compared = await self._compare(loop)
                    if not compared:
                        await asyncio.sleep(WAIT_SECONDS)
            finally:
                await on_loop(loop, self._judge.close())

    async def _compare(self, loop: asyncio.AbstractEventLoop) -> int:
        """Compare replies to some prompts, and return to how many; 0: there is nothing to compare now."""
        version, live, key = await self._ledger.look(_in_shadow)
        name = f"{self._policy}@step-{version}"
        if version is None or name not in self._run.policies.past:
            return 0
        if self._compared != (version, live):
            self._compared, self._waiting, self._after = (version, live), {}, 0.0
            self._told = await self._ledger.told(f"compared {version} ")
        for row in await self._store.consenting(f"{self._policy}@step-{live}", self._after):
            self._waiting[f"compared {version} {canary_user(key, row['subject'] or row['session_id'])}"] = row
            self._after = row["ended_at"]
        for told in self._told & self._waiting.keys():
            del self._waiting[told]
        asked = dict(islice(reversed(self._waiting.items()), AT_ONCE))  # the newest first

        async def one(row: Mapping[str, Any]) -> float | None:
            (logged,) = await self._run.store.calls.trajectories([row["episode_id"]])
            if not logged.chats:  # deleted meanwhile
                return None
            seed = random.Random(f"{version} {row['session_id']}")
            chat = seed.choice(logged.chats)
            new = await self._answered(name, chat, seed.randrange(2**63))
            group = _group(logged, chat, new, seed.randrange(2**31))
            found = await on_loop(loop, self._judge.judge(group, NoBook()))
            return 2 * found[NEW][self._compares] - 1

        results = await together(*(one(row) for row in asked.values()))
        compared: list[tuple[str, Observation]] = [
            (key, Compared(version=version, against=live, difference=difference))
            for key, difference in zip(asked, results, strict=True)
            if difference is not None
        ]
        await self._ledger.add_all(compared)
        self._told |= asked.keys()
        return len(compared)

    async def _answered(self, policy: str, chat: Chat, seed: int) -> Chat:
        """Return a logged call with the reply of another version to its exact prompt."""
        prompt, runtime = TokenSequence(chat.prompt_ids, chat.all_media), self._run.policies.runtime(policy)
        request = EngineRequest(
            policy=policy, prompt=prompt, sampling=replace(chat.sampling, seed=seed), streamed=False
        )
        ids: list[int] = []
        async with aclosing(runtime.engine.generate(request)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                ids += piece.ids
        said = runtime.renderer.parse(np.array(ids, np.int32), lambda: chat.prompt_ids, chat.tools, "shadow")
        return replace(chat, policy=policy, reply=said.message)


def _in_shadow(gate: Gate) -> tuple[int | None, int, bytes]:
    """Return the version in the shadow, the live one, and the key of users."""
    trial = gate.trial
    shadowed = trial is not None and gate.stages[trial.version] is VersionStage.SHADOW
    return (trial.version if trial is not None and shadowed else None), gate.live or 0, gate.key


def _group(logged: Trajectory, live: Chat, new: Chat, seed: int) -> JudgedGroup:
    """Return two replies to one prompt, as a judge that compares is shown them: in an order and its mirror image."""

    def of(name: str, chat: Chat) -> Trajectory:
        step = replace(logged.steps[0], chats=(chat,))
        return Trajectory(episode=replace(logged.episode, episode_id=name), steps=(step,))

    return JudgedGroup(
        kind="validation",
        group_index=0,
        trajectories=(of("live", live), of(NEW, new)),
        waiting=frozenset({NEW}),
        seed=seed,
    )
