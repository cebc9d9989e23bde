"""The gate in the server of a run: offers versions, chooses what serves a session, and tells the gate how it went."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from palestra.config import JudgeConfig
from palestra.config.budget import token_prices
from palestra.errors import CheckpointError, StoreError
from palestra.learner import OpenRun
from palestra.learner.gathering import Restart
from palestra.learner.reporting import checkpoints_of
from palestra.learner.shares import rewards_of
from palestra.models.weights import SavedWeights
from palestra.server import DataPlane
from palestra.store.spending import used_by
from palestra.threads import in_thread
from palestra.trainer import checkpoint
from palestra.types.calls import PolicyVersion
from palestra.types.states import EpisodeState
from palestra.waiting import LoggedOnce, cancelled
from palestra_live.gate.config import GateBounds, GateConfig, bounds_of
from palestra_live.gate.ledger import GateLedger, new_started
from palestra_live.gate.lineage import Lineage, Return
from palestra_live.gate.machine import Gate
from palestra_live.gate.records import FAILED, Audited, HeldOut, Observation, Offered, SessionEnded, VersionStage
from palestra_live.gate.routing import Routing, canary_user, hashed, version_for
from palestra_live.gate.standing import standing
from palestra_live.sessions import Versions
from palestra_live.shadow import Shadow
from palestra_live.store import LiveStore, NewSession, SessionState

log = logging.getLogger("palestra.live")
RETURNS, REPORTED, TOLD = "live_returns", "live_reported", "live_told"  # facts of a run
TICK_SECONDS = 0.5  # a switch by another process is seen so soon
VERSIONS = "versions"  # in the folder of a run: weights that serve, or may serve again
AT_ONCE = 500  # sessions told in one transaction
REFUSAL = re.compile(  # an apology, or what can't be done ("I can't find your order"), is none
    r"\b(i|we)(['’](m|re)| am| are)? (can(no|['’]| no)t|won['’]t|will not|unable to|not (able|allowed|permitted) to|"
    r"(must |have to )?(refuse|decline) to) (\w+ )?(help|assist|answer|do (that|this|so)|provide|discuss|comply|fulfil|"
    r"respond|share|create|generate|write|engage|support|offer|give|talk about)\b",
    re.I,
)
BEGINNING = 200  # characters in which a reply refuses


@asynccontextmanager
async def open_gate(
    run: OpenRun, plane: DataPlane, store: LiveStore, config: GateConfig, judge: JudgeConfig | None
) -> AsyncIterator[GateService]:
    """Yield what chooses versions, while the gate watches over the run.

    The trainer has the weights that the run began with. Versions that a resumed run serves are loaded before the block.

    Raises:
        ConfigError: the judge can't be made.
        StoreError: RUN/gate.db cannot be opened, or the live version has no weights.
    """
    ledger = GateLedger(run.folder.path)
    try:
        service = GateService(run, store, ledger)
        await service.start(bounds_of(config, judge))
        tasks = [asyncio.create_task(service.run())]
        if judge is not None:
            tasks.append(asyncio.create_task(Shadow(run, plane, store, ledger, judge).run()))
        try:
            yield service
        finally:
            await cancelled(*tasks)
    finally:
        ledger.close()


class GateService(Versions):
    """Offers new checkpoints as candidates, and keeps the weights of those that serve in the engine."""

    def __init__(self, run: OpenRun, store: LiveStore, ledger: GateLedger) -> None:
        super().__init__(run)
        self._store, self._ledger, self._folder = store, ledger, run.folder.path / VERSIONS
        self._told: set[str] = set()  # of sessions: those that ended at `_after` or later
        self._after = 0.0  # all sessions that ended before this time are told
        self._lineage = Lineage()
        self._changing = asyncio.Lock()  # of checkpoints, or what is kept of them

    async def start(self, config: GateBounds) -> None:
        """Replay the gate, and load the versions that new and open sessions need."""
        if await self._ledger.restate():
            live = await self._ledger.look(lambda gate: gate.live)
            text = (
                "the gate's decisions were not those of this version of Palestra, which has made them again (gate.db "
                f"keeps the former ones); version {live} is live"
            )
            await self._run.event("warning", {"code": "gate_restated", "step": self._run.progress.step, "text": text})
        started = await self._recall()
        bounds, begun = config.model_dump(mode="json"), f"started {len(started)}"
        if not started or await self._ledger.look(lambda gate: gate.bounds) != config:
            await self._tell([(begun, new_started(0, bounds))])
        await self._ledger.refresh()
        trainer, first = self._run.trainer, self._weights(0)
        assert trainer is not None
        if await in_thread(lambda: checkpoint.read_weights(first)) is None:  # the trainer has them now, never again
            self._folder.mkdir(mode=0o700, exist_ok=True)
            await trainer.save_weights(self._policy, first, 0, "version 0")
        returns = json.loads(await self._run.store.log.fact(RETURNS) or "[]")
        self._lineage = Lineage(tuple(Return(*one) for one in returns))
        await self._load(0)
        for version in sorted(await self._needed()):
            await self._load(version)

    async def _recall(self) -> set[str]:
        """Read which sessions the gate knows already; return the keys of its starts."""
        started = await self._ledger.told("started ")
        self._told = started | await self._ledger.told("held ")
        self._after = float(await self._run.store.log.fact(TOLD) or 0.0)
        return started

    async def choose(self, new: NewSession) -> str:
        """Return the name of the version that serves a new session until its end."""
        routing = self._routing
        user = canary_user(routing.key, new.subject or new.session_id)
        version = version_for(routing, user)
        if routing.canary is not None:
            name = hashed(routing.key, "session", new.session_id).hex()[:24]
            await self._ledger.log_route(name, user, version, routing)
        return self._name(version)

    async def ready(self, restart: Restart) -> str:
        """Return the trainer to the live weights if it has descendants of a version that failed; see `Versions`."""
        step, most = self._run.progress.step, self._run.config.rollout.max_staleness
        async with self._changing:
            if (known := self._lineage.before(step)) != self._lineage:
                await self._descend(known)
            live, failed, self.on_trial = await self._ledger.look(
                lambda gate: (gate.live or 0, _failed(gate), standing(gate))
            )
            if self._lineage.strays(step, live, failed):
                await restart(lambda: self._replace(step, live))
                await self._descend(self._lineage.with_return(step, live))
                text = f"after step {step}, training goes on with the weights of version {live}, which is live"
                await self._run.event("gate_returned", {"step": step, "version": live, "text": text})
        if (held := self._run.policies.held.get(self._policy)) is not None:
            lift = 'to lift it, resume with audit.action = "warn"'
            return f"waits, because the audit holds every new version back ({held.reason}); {lift}"
        age = self._lineage.age(step, live)
        if age is not None and age <= most:
            return ""
        return f"waits for the gate to decide; the trained weights are {age} steps past version {live}"

    def age(self, version: int, newest: int) -> int | None:
        """Return the steps from a version that served to the weights in training; see `Versions`."""
        return self._lineage.age(self._run.progress.step, version)

    async def _descend(self, lineage: Lineage) -> None:
        await self._run.store.log.set_fact(RETURNS, json.dumps(lineage.returns))
        self._lineage = lineage

    def _replace(self, step: int, version: int) -> None:
        """Give the checkpoint of a step the weights of a version."""
        folder = checkpoints_of(self._run.folder.path, self._policy, self._run.config)
        source, found = self._weights(version), checkpoint.good(folder, step)
        if checkpoint.read_weights(source) is None or found is None:
            raise StoreError(f"{source} is missing or damaged, and version {version} serves; put it back from a copy")

        def fill(target: Path) -> None:
            shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)
            (target / checkpoint.INDEX).unlink()  # the new one must not be written into the old file

        checkpoint.write(folder, step, fill, found[1], self._run.config.checkpoint.keep)

    async def run(self) -> None:
        """Look for checkpoints, ended sessions and orders, until cancelled."""
        trouble = LoggedOnce(log, "the gate can't go on now")
        while True:
            with trouble.attempt():
                await self._tick()
            await asyncio.sleep(TICK_SECONDS)

    async def _tick(self) -> None:
        await self._ledger.refresh()
        await self._tell_sessions()
        await self._heed_audit()
        async with self._changing:
            await self._offer()
        await self._report()
        needed = await self._needed()
        for version in sorted(needed):  # another process may have made an order
            await self._load(version)
        for name in [name for name in self._run.policies.past if name.startswith(f"{self._policy}@step-")]:
            version = int(name.rpartition("-")[2])
            if version not in needed and version != 0:
                await self._unload(version)
        for version in await self._ledger.look(_failed) - needed:  # which never serves again
            await in_thread(partial(shutil.rmtree, self._weights(version), ignore_errors=True))

    async def _tell(self, told: list[tuple[str, Observation]]) -> None:
        await self._ledger.add_all(told)
        self._told.update(key for key, _ in told)

    async def _report(self) -> None:
        """Record what was decided, by any process, as events of the run."""
        log = self._run.store.log
        for one in await self._ledger.decided(int(await log.fact(REPORTED) or 0)):
            await self._run.event("gate_decided", one.decision.event | {"number": one.number, "at": one.at})
            await log.set_fact(REPORTED, str(one.number))

    async def _offer(self) -> None:
        """Offer the newest checkpoint where none is on trial."""
        known, live, failed, busy = await self._ledger.look(
            lambda gate: (set(gate.stages), gate.live or 0, _failed(gate), gate.trial is not None)
        )
        if busy:
            return
        found = checkpoint.found(checkpoints_of(self._run.folder.path, self._policy, self._run.config))
        if not found or (version := checkpoint.step_of(found[-1])) <= max(known):
            return
        if self._lineage.strays(version, live, failed) or self._lineage.age(version, live) == 0:
            return  # training returns to the live weights, or has done so
        held_out = await self._held_out(version, live)
        if held_out is None:
            return
        held = self._run.policies.held.get(self._policy)
        told: list[tuple[str, Observation]] = [(f"offered {version}", Offered(version=version))]
        if held is not None and held.holds(version):
            told.append((f"audited {version}", Audited(version=version, passed=False, reason=held.reason)))
        else:
            await in_thread(lambda: self._keep(found[-1], version))
            await self._load(version)
            told.append((f"audited {version}", Audited(version=version, passed=True)))
            told.append((f"held out {version}", HeldOut(version=version, differences=held_out)))
        await self._tell(told)

    async def _held_out(self, version: int, live: int) -> tuple[float, ...] | None:
        """Return a version's rewards of held-out tasks, each minus the live version's; None: they are not all known.

        Both were evaluated by the learner after their steps. Rewards outside of 0 to 1 count as the nearer of the two.
        """
        if not self._run.config.evaluation.is_on:
            return ()
        scores = await self._scores(version), await self._scores(live)
        both = sorted(scores[0].keys() & scores[1].keys())
        return tuple(scores[0][task] - scores[1][task] for task in both) or None

    async def _scores(self, version: int) -> dict[str, float]:
        """Return the reward of each held-out task that was scored, from 0 to 1; {}: the evaluation is not over."""
        if "validation/total" not in await self._run.store.log.metrics_of(version):
            return {}
        roles, algorithm = self._run.policies.roles, self._run.config.algorithm_of(self._policy)
        found: dict[str, float] = {}
        for _, members in await self._run.store.groups.of_step("validation", version):
            for reward in rewards_of([e for e in members if e.state is EpisodeState.COMPLETED], roles, algorithm):
                found[members[0].task.task_id] = min(max(reward, 0.0), 1.0)
        return found

    async def _heed_audit(self) -> None:
        """Tell the gate of an audit that holds back a version which serves."""
        held, routing = self._run.policies.held.get(self._policy), self._routing
        for version in (routing.live, routing.canary):
            key = f"held {version}"
            if version is not None and held is not None and held.holds(version) and key not in self._told:
                await self._tell([(key, Audited(version=version, passed=False, reason=held.reason))])

    async def _tell_sessions(self) -> None:
        """Tell the gate of newly settled sessions. Those that ended after an unsettled one are read again."""
        unsettled, read = await self._store.unsettled_since(), self._after
        recent: dict[str, float] = {}  # when they ended
        while True:
            found, told = await self._store.outcomes(read, AT_ONCE), list[tuple[str, Observation]]()
            for outcome in found:
                key = f"session {hashed(self._routing.key, 'session', outcome['session_id']).hex()[:24]}"
                recent[key] = read = outcome["ended_at"]
                if key not in self._told and (ended := await self._ended(outcome)) is not None:
                    told.append((key, ended))
            if told:
                await self._tell(told)
            if len(found) < AT_ONCE:
                break
        after = min(read, math.nextafter(unsettled, 0.0))
        if after != self._after:  # not before all are stored
            await self._run.store.log.set_fact(TOLD, repr(after))
            self._after = after
        self._told = {key for key in self._told if recent.get(key, 0.0) > after or not key.startswith("session ")}

    async def _ended(self, outcome: Mapping[str, Any]) -> SessionEnded | None:
        """Return what the gate is told of a session; None: it has no call, or was served before the gate was."""
        policy, _, step = outcome["policy"].rpartition("@step-")
        if policy != self._policy or not outcome["calls"]:
            return None
        tokens = cost = refused = None
        if outcome["episode_id"] is not None:
            (trajectory,) = await self._run.store.calls.trajectories([outcome["episode_id"]])
            if chats := trajectory.chats:  # of a session without consent nothing is known but time and errors
                tokens = sum(len(chat.completion_ids) for chat in chats) / len(chats)
                refused = any(REFUSAL.search(chat.reply.text, 0, BEGINNING) for chat in chats)
                if price := token_prices(self._run.config).get(self._policy):
                    used = [used_by(chat, "live", "") for chat in chats]
                    cost = float(sum(price.of(one.prompt_tokens, one.reply_tokens) for one in used)) / len(chats)
        return SessionEnded(
            version=int(step),
            user=canary_user(self._routing.key, outcome["subject"] or outcome["session_id"]),
            score=outcome["score"],
            seconds=outcome["seconds"] / outcome["calls"],
            tokens=tokens,
            cost=cost,
            refused=refused,
            failed=outcome["errors"] > 0,
        )

    async def _needed(self) -> set[int]:
        """Return the versions that new sessions get, to which the gate may go back, and that open sessions have."""

        def served(gate: Gate) -> set[int]:
            trial = set() if gate.trial is None else {gate.trial.version}
            retired = set(gate.before[-1:])
            return {version for version, stage in gate.stages.items() if stage is VersionStage.LIVE} | trial | retired

        found = await self._ledger.look(served)
        for row in await self._store.in_state(SessionState.OPEN):
            policy, _, step = row["policy"].rpartition("@step-")
            if policy == self._policy:
                found.add(int(step))
        return found

    def _keep(self, source: Path, version: int) -> None:
        """Keep the weights of a checkpoint, which its run removes at some time, without taking more of the disk."""
        target = self._weights(version)
        if checkpoint.read_weights(target) is not None:
            return
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            shutil.copytree(source, target, copy_function=os.link)
            checkpoint.without_optimizer(target)
        except (OSError, KeyError) as error:
            shutil.rmtree(target, ignore_errors=True)
            raise CheckpointError(f"the weights of {source} can't be kept in {target}: {error}") from error

    async def _load(self, version: int) -> None:
        """Give a version to the engine, if it does not have it."""
        name = self._name(version)
        if name in self._run.policies.past:
            return
        engine, folder = self._run.policies.runtimes[self._policy].engine, self._weights(version)
        if await in_thread(lambda: checkpoint.read_weights(folder)) is None:
            raise StoreError(f"{folder} is missing or damaged, and version {version} serves; put it back from a copy")
        await engine.add_policy(name, self._policy, PolicyVersion(0, version), SavedWeights(folder))
        self._run.policies.add_past(name, self._policy)

    async def _unload(self, version: int) -> None:
        name = self._name(version)
        self._run.policies.remove_past(name)
        await self._run.policies.runtimes[self._policy].engine.remove_policy(name)

    def _weights(self, version: int) -> Path:
        return self._folder / f"step-{version:06d}"

    def _name(self, version: int) -> str:
        return f"{self._policy}@step-{version}"

    @property
    def _routing(self) -> Routing:
        routing = self._ledger.routing
        assert routing is not None, "a gate that is open has been started"
        return routing


def _failed(gate: Gate) -> set[int]:
    """Return the versions from which nothing is trained any more."""
    return {version for version, stage in gate.stages.items() if stage in FAILED}
