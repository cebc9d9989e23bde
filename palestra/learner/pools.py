"""Past versions of the trained policies: written, published to the engine, and dropped when too old.

A version is on disk, atomically, before an episode can use it, and stays as long as one may. The step number alone
determines the versions, so a restarted run has the same pool.
"""

from __future__ import annotations

import shutil

from palestra.config import PoolConfig, past_name, past_of
from palestra.errors import CheckpointError
from palestra.learner.open_run import OpenRun
from palestra.models.weights import SavedWeights
from palestra.store.casting import Casting
from palestra.trainer import checkpoint
from palestra.trainer.base import Trainer
from palestra.types.calls import PolicyVersion


class Pools:
    """Keeps the versions that may play roles with a pool."""

    def __init__(self, run: OpenRun, trainer: Trainer) -> None:
        """Let claims choose the version that plays, and add past versions to the run's policies from `open` on."""
        self._run, self._trainer = run, trainer
        self._ahead = run.config.rollout.max_staleness
        roles = run.config.players
        self._pools: dict[str, list[PoolConfig]] = {}
        for role, pool in roles.pools.items():
            self._pools.setdefault(roles.named[role], []).append(pool)
        self._casting = Casting(roles, run.config.seed, self._ahead)
        if self._pools:
            run.store.episodes.casting = self._casting

    async def open(self) -> None:
        """Publish the versions that the next step's episodes may use, before one can be claimed.

        The trainer has the weights of step 0 now: a new run writes them, and a run killed before they were on disk
        writes them again.
        """
        if not self._pools:
            return
        if await self._run.store.log.fact("config_digest") is None:  # what is there is of a run that was removed
            for policy, step in self._on_disk():
                shutil.rmtree(self._run.folder.pools / past_name(policy, step), ignore_errors=True)
        bound = await self._bound()
        for policy in self._pools:
            if 0 in self._kept(policy, bound):
                await self._write(policy, 0)
        for policy, step in sorted(self._on_disk(), key=lambda found: found[1]):
            if step > bound or step in self._kept(policy, bound):
                await self._load(policy, step)
                self._casting.done = max(self._casting.done, step)

    async def check(self, step: int) -> None:
        """Check the versions that the next steps' episodes may use, after a checkpoint was loaded.

        Versions of later steps are created again when these steps are repeated.
        """
        bound = await self._bound()
        for policy in self._pools:
            for version in self._kept(policy, bound) | self._kept(policy, max(bound, step)):
                if version <= step and past_name(policy, version) not in self._run.policies.past:
                    name = past_name(policy, version)
                    raise CheckpointError(
                        f"{self._run.folder.pools / name} is missing or damaged, and episodes may be played against "
                        f"{name}; put it back from a copy, or start a new run"
                    )

    async def add(self, step: int) -> None:
        """Add the present weights of each policy that is due after a step, and drop unneeded versions."""
        for policy, pools in self._pools.items():
            if any(step % pool.every_steps == 0 for pool in pools):
                await self._write(policy, step)
                await self._load(policy, step)
        self._casting.done = max(self._casting.done, step)
        bound = max(step - self._ahead, 0)
        for policy, version in sorted(self._on_disk()):
            if version <= bound and version not in self._kept(policy, bound):
                name = past_name(policy, version)
                self._run.policies.remove_past(name)
                await self._run.engine.remove_policy(name)
                shutil.rmtree(self._run.folder.pools / name, ignore_errors=True)

    async def _bound(self) -> int:
        """Return the newest version that an episode of the step after the last manifest may meet."""
        return max(await self._run.store.log.last_manifest() - self._ahead, 0)

    def _kept(self, policy: str, bound: int) -> set[int]:
        """Return the versions of all pools of a policy at a step."""
        return {version for pool in self._pools[policy] for version in pool.versions(bound)}

    def _on_disk(self) -> list[tuple[str, int]]:
        """Return policy and step of each version that has a folder."""
        found = [past_of(path.name) for path in self._run.folder.pools.glob("*@*")]
        return [one for one in found if one is not None and one[0] in self._pools]

    async def _write(self, policy: str, step: int) -> None:
        """Write the present weights of a policy as its version of a step, unless it is there, whole."""
        name = past_name(policy, step)
        # After a kill the step is repeated. What is there has played in recorded episodes, and stays what it is.
        if checkpoint.read_weights(self._run.folder.pools / name) is None:
            self._run.folder.pools.mkdir(mode=0o700, exist_ok=True)
            await self._trainer.save_weights(policy, self._run.folder.pools / name, step, f"pool {name}")

    async def _load(self, policy: str, step: int) -> None:
        """Give the engine a version from its folder; a damaged one is left out."""
        name = past_name(policy, step)
        state = checkpoint.read_weights(self._run.folder.pools / name)
        if state is not None and name not in self._run.policies.past:
            version = PolicyVersion(int(state["incarnation"]), int(state["n"]))
            await self._run.engine.add_policy(name, policy, version, SavedWeights(self._run.folder.pools / name))
            self._run.policies.add_past(name, policy)
