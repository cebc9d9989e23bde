"""Pools of two cadences in one job: which versions there are after each step, who meets which, and after a restart."""

from __future__ import annotations

import json
import sqlite3

import pytest

from palestra.errors import ConfigError
from unit.learner.scripted_job import ScriptedJob, config

# After each step: of every second step the newest two for `fast`, of every third the newest two for `slow`.
FAST = [{0}, {0}, {0, 2}, {0, 2}, {2, 4}, {2, 4}, {4, 6}, {4, 6}]
SLOW = [{0}, {0}, {0}, {0, 3}, {0, 3}, {0, 3}, {3, 6}, {3, 6}]
STEPS = 7


def pool(every: int, policy: str = "white") -> dict:
    return {"policy": policy, "pool": {"every_steps": every, "size": 2}}


def job_of(folder, **changes) -> ScriptedJob:
    roles = {"fast": pool(2), "slow": pool(3)}
    return ScriptedJob(folder, config(policies={"white": {}}, roles=roles, steps=STEPS, **changes))


def steps_in(names) -> set[int]:
    return {int(name.removeprefix("white@")) for name in names}


async def run(job: ScriptedJob, stop_after: int = STEPS) -> dict[int, tuple[set[int], set[int]]]:
    """Run the job; the versions that the engine has, and those on the disk, after each step."""
    seen = {}

    def heard(kind, data):
        if kind == "step":
            on_disk = {path.name for path in job.folder.pools.glob("*@*")}
            seen[int(data["step"])] = (steps_in(job.policies.past), steps_in(on_disk))
            if data["step"] == stop_after:
                job.learner.stop()

    job.on_event = heard
    await job.create_policy()
    await job.learner.prepare()
    job.create_policy = nothing
    await job.run()
    return seen


async def nothing() -> None:
    """The policy is there already."""


def players(folder) -> dict[int, dict[str, set[int]]]:
    """The versions that each role was played by, by the step of the episode."""
    found: dict[int, dict[str, set[int]]] = {}
    with sqlite3.connect(folder / "run.db") as db:
        wanted = (
            "SELECT g.step, e.players FROM episodes e "
            "JOIN groups g ON g.kind = e.kind AND g.group_index = e.group_index "
            "WHERE e.kind = 'train' AND e.state = 'completed'"
        )
        for step, text in db.execute(wanted):
            for role, name in json.loads(text).items():
                found.setdefault(step, {"fast": set(), "slow": set()})[role] |= steps_in([name])
    return found


async def test_each_role_meets_its_own_versions_and_no_others_are_kept(tmp_path):
    kept = [fast | slow for fast, slow in zip(FAST, SLOW, strict=True)]
    seen = await run(job_of(tmp_path))
    assert seen == {step: (kept[step], kept[step]) for step in range(STEPS + 1)}
    met = players(tmp_path)
    assert set(met) == set(range(1, STEPS + 1))
    for step, roles in met.items():
        assert roles["fast"] <= FAST[step - 1]
        assert roles["slow"] <= SLOW[step - 1]
    assert set().union(*(roles["fast"] for roles in met.values())) >= {0, 2, 4}
    assert set().union(*(roles["slow"] for roles in met.values())) >= {0, 3}


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [1, 3, 4, 6])
async def test_after_a_restart_there_are_the_same_versions_with_the_same_weights(tmp_path, stop_after):
    whole = job_of(tmp_path / "whole")
    await run(whole)
    await run(job_of(tmp_path / "job"), stop_after)
    again = job_of(tmp_path / "job")
    await run(again)
    assert again.trainer.digest("white") == whole.trainer.digest("white")
    assert players(tmp_path / "job") == players(tmp_path / "whole")
    for path in whole.folder.pools.glob("*@*"):
        own = again.folder.pools / path.name
        for file in path.iterdir():
            assert (own / file.name).read_bytes() == file.read_bytes(), file


async def test_a_run_that_is_resumed_with_another_configuration_keeps_its_versions(tmp_path):
    """Nothing is loaded, written or removed before the configurations were compared."""
    await run(job_of(tmp_path), stop_after=5)
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "pool").rglob("*"))}
    other = job_of(tmp_path, seed=5)
    loaded = []

    async def add_policy(name, *rest):
        loaded.append(name)

    other.engine.add_policy = add_policy
    await other.create_policy()
    with pytest.raises(ConfigError, match="another configuration"):
        await other.learner.prepare()
    other.store.close()
    assert loaded == []
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "pool").rglob("*"))} == before
