"""The findings of a recorded run: its episodes, what its store adds, and what can't be read."""

from __future__ import annotations

import json
import sqlite3

import pytest

from palestra.cli.main import main
from palestra.config import dump_config, load_config, parse_config
from palestra.doctor import examination
from palestra.doctor.examination import examine
from palestra.doctor.store_facts import disk_facts, opponent_facts, store_facts
from palestra.errors import NotFound, StoreError
from palestra.store.browsing import browse
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.calls import PolicyVersion
from palestra.types.records import BatchManifest, Task
from palestra.types.states import GroupState
from unit.building import FakeClock, make_chat, open_store
from unit.doctor.curves import run_of
from unit.learner.scripted_job import ScriptedJob, config

STEPS = 8


async def record(folder, change=lambda step: {}, rewards=None) -> None:
    """Write a run of `STEPS` steps with one group of four episodes each; of the last, one reply is long."""
    settings = {"name": "r", "steps": 30, "engine": {"kind": "fake"}, "rollout": {"groups_per_step": 16}}
    (folder / "config.toml").write_text(dump_config(parse_config(settings)))
    with open_store(folder, FakeClock()) as store:
        for row in run_of(STEPS, change):
            step = int(row["step"])
            await store.groups.register("train", step, step, Task(task_id=f"t{step}", data={}), 4)
            for sample in range(4):
                claimed = await store.episodes.claim("w", f"r{step}-{sample}", None)
                name = claimed.episode_id
                completion = range(4, 20 if sample == 2 else 6)
                await store.calls.append(make_chat(name, completion=completion))
                given = {"agent": float(sample)} if rewards is None else rewards(step, sample)
                await store.episodes.end(name, 1, EpisodeEnd(rewards=given))
            await store.log.commit_manifest(manifest_of(step))
            await store.log.put_metrics(step, {k: v for k, v in row.items() if k[:4] not in ("stor", "disk")})


def manifest_of(step: int, size: int = 4) -> BatchManifest:
    """The batch of a step: all episodes of the group that has its number."""
    names = tuple(f"train-{step:06d}-{sample:02d}" for sample in range(size))
    versions = {"policy": PolicyVersion(0, step - 1)}
    return BatchManifest(step=step, versions=versions, episode_ids=names, seed=0, config_digest="d")


@pytest.mark.parametrize(
    ("reasons", "code"),
    [
        (["KeyError: x", "KeyError: x"], 1),
        (["KeyError: x", None], 0),  # one was completed
        (["not_scored: left out", "cancelled: over"], 0),
        ([], 0),
    ],
)
async def test_a_run_whose_episodes_all_failed_before_the_first_step_exits_with_1(tmp_path, reasons, code, capsys):
    (tmp_path / "config.toml").write_text(dump_config(config()))
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 0, 1, Task(task_id="t", data={}), 4)
        for place, reason in enumerate(reasons):
            name = (await store.episodes.claim("w", f"r{place}", None)).episode_id
            if reason is None:
                await store.episodes.end(name, 1, EpisodeEnd(rewards={"agent": 1.0}))
            else:
                await store.episodes.abort(name, 1, reason, discard=True)
    assert main(["doctor", str(tmp_path)]) == code
    assert "no step is finished yet" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["failed"] == (len(reasons) if code else 0)


async def test_an_environment_that_is_dead_from_the_first_episode_is_named_with_its_reason(tmp_path, capsys):
    """The job ends before any episode has used up its attempts, and those in flight are given back."""
    (tmp_path / "config.toml").write_text(dump_config(config()))
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 0, 1, Task(task_id="t", data={}), 4)
        failed = [await store.episodes.claim("w", f"r{place}", None) for place in range(3)]
        for one in failed:
            await store.episodes.abort(one.episode_id, one.fence, "environment_failed: it is gone", discard=False)
        for place in range(4):
            one = await store.episodes.claim("w", f"s{place}", None)
            await store.episodes.abort(one.episode_id, one.fence, "cancelled: the job was stopped", False, counts=False)
    for words in (["doctor", str(tmp_path)], ["doctor", str(tmp_path), "--json"]):
        assert main(words) == 1
        assert "it is gone" in capsys.readouterr().out
    assert main(["episodes", str(tmp_path)]) == 0
    assert "environment_failed: it is gone" in capsys.readouterr().out
    with open_store(tmp_path, FakeClock()) as store:
        await store.log.add_event("failed", {"reason": "3 episodes in a row failed"})
    assert examine(tmp_path).reason == "3 episodes in a row failed"


async def test_a_job_that_was_stopped_before_its_first_step_has_not_failed(tmp_path):
    (tmp_path / "config.toml").write_text(dump_config(config()))
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 0, 1, Task(task_id="t", data={}), 2)
        one = await store.episodes.claim("w", "r", None)
        await store.episodes.abort(one.episode_id, one.fence, "cancelled: the job was stopped", False, counts=False)
    assert main(["doctor", str(tmp_path)]) == 0


async def test_a_healthy_run_has_no_finding_and_exits_with_0(tmp_path, capsys):
    await record(tmp_path)
    assert examine(tmp_path).findings == ()
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}, step 8/30: nothing found\n"


async def test_a_finding_names_the_episodes_that_show_it(tmp_path, capsys):
    await record(tmp_path, lambda step: {"rollout__truncated_share": 1.0} if step > 3 else {})
    (finding,) = examine(tmp_path).findings
    assert (finding.code, finding.since, finding.until, finding.holds) == ("truncated", 6, 8, True)
    assert finding.episodes == tuple(f"train-000008-0{sample}" for sample in (2, 0, 1, 3))
    assert main(["doctor", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for part in ("truncated  since step 6", "it means", "max_tokens", "train-000008-02"):
        assert part in text
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 8
    assert found["findings"][0]["episodes"] == list(finding.episodes)


async def test_attempts_that_fail_are_counted_with_their_reasons(tmp_path):
    await record(tmp_path)
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 9, 9, Task(task_id="t9", data={}), 3)
        for sample, (reason, discard) in enumerate(
            [("environment_failed: x\x1b[2J", False), ("environment_failed: x\x1b[2J", True), ("not_scored: -", True)]
        ):
            claimed = await store.episodes.claim("w", f"f{sample}", None, f"train-000009-0{sample}")
            await store.episodes.abort(claimed.episode_id, claimed.fence, reason, discard)
        row = run_of(9)[-1]
        await store.log.put_metrics(9, {k: v for k, v in row.items() if k[:4] not in ("stor", "disk")})
    with browse(tmp_path / "run.db") as connection:
        facts = store_facts(connection)
    assert facts[8]["store/claims"] == 4
    assert facts[8]["store/failures"] == 0
    assert {name: value for name, value in facts[9].items() if value} == {
        "store/claims": 3,
        "store/failures": 2,
        "store/reason/environment_failed: x\x1b[2J": 2,
    }
    assert examine(tmp_path).findings == ()  # 2 of 11 attempts, and the rule wants 3


@pytest.mark.parametrize(("calls", "found"), [(3, True), (1, False), (0, False)])
async def test_attempts_that_fail_where_episodes_end_are_found(tmp_path, calls, found):
    """A model that voids what it loses does so at the end; a machine fails at any call, or before the first."""
    settings = {"name": "r", "steps": 3, "engine": {"kind": "fake"}, "rollout": {"groups_per_step": 16}}
    (tmp_path / "config.toml").write_text(dump_config(parse_config(settings)))
    with open_store(tmp_path, FakeClock()) as store:
        for row in run_of(3):
            step = int(row["step"])
            await store.groups.register("train", step, step, Task(task_id=f"t{step}", data={}), 4)
            for sample in range(4):
                for voided in (True, False) if sample % 2 else (False,):
                    claimed = await store.episodes.claim("w", f"r{step}-{sample}-{voided}", None)
                    name, fence = claimed.episode_id, claimed.fence
                    for index in range(calls if voided else 3):
                        await store.calls.append(make_chat(name, index=index, fence=fence))
                    if voided:
                        await store.episodes.abort(name, fence, "environment_failed: the screen has ended", False)
                    else:
                        await store.episodes.end(name, fence, EpisodeEnd(rewards={"agent": 1.0}))
            await store.log.commit_manifest(manifest_of(step))
            await store.log.put_metrics(step, {k: v for k, v in row.items() if k[:4] not in ("stor", "disk")})
    codes = {finding.code for finding in examine(tmp_path).findings}
    assert ("replays_late" in codes) == found
    assert "workers_fail" in codes


async def test_control_characters_of_a_reason_do_not_reach_the_terminal(tmp_path, capsys):
    await record(tmp_path)
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 9, 9, Task(task_id="t9", data={}), 6)
        for sample in range(6):
            claimed = await store.episodes.claim("w", f"f{sample}", None, f"train-000009-0{sample}")
            await store.episodes.abort(claimed.episode_id, claimed.fence, "agent_failed: \x1b[2J\u202e", True)
        row = run_of(9)[-1]
        await store.log.put_metrics(9, {k: v for k, v in row.items() if k[:4] not in ("stor", "disk")})
    assert main(["doctor", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "workers_fail" in text
    assert "6 of 14 attempts" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    assert "\x1b" not in capsys.readouterr().out


async def test_opponents_are_read_from_the_rewards_of_the_episodes(tmp_path):
    def both_rise(step: int, sample: int) -> dict[str, float]:
        if step <= 3:
            return {"black": 1.0, "white": -1.0} if sample % 2 else {"black": -1.0, "white": 1.0}
        return {"black": 1.0, "white": 1.0}

    await record(tmp_path, rewards=both_rise)
    (finding,) = examine(tmp_path).findings
    assert (finding.code, finding.until) == ("opponents_rise", 8)
    assert "black from 0 to 1" in finding.seen
    assert len(finding.episodes) == 4


async def test_a_group_that_was_dropped_says_nothing_of_opponents_as_in_the_running_job(tmp_path):
    """Its episodes are not in the batch: here both agents of most of them were paid by mistake."""
    await record(tmp_path, rewards=lambda step, sample: {"a": float(sample % 2), "b": 1.0 - sample % 2})
    with open_store(tmp_path, FakeClock()) as store:
        await store.groups.register("train", 9, 3, Task(task_id="t9", data={}), 8)
        for sample in range(8):
            claimed = await store.episodes.claim("w", f"d{sample}", None, f"train-000009-0{sample}")
            await store.episodes.end(
                claimed.episode_id, claimed.fence, EpisodeEnd(rewards={"a": sample % 2, "b": sample % 2})
            )
        await store.groups.settle("train", {9: GroupState.DROPPED})
    with browse(tmp_path / "run.db") as connection:
        facts = store_facts(connection)
        told = opponent_facts(connection, [3])[3]
    assert facts[3]["store/claims"] == 12
    assert (facts[3]["store/reward_correlation"], facts[3]["store/constant_sum_share"]) == (-1.0, 1.0)
    assert told.items() <= facts[3].items()


async def test_a_damaged_batch_leaves_the_findings_of_the_others(tmp_path):
    await record(tmp_path, rewards=lambda step, sample: {"a": float(sample % 2), "b": 1.0 - sample % 2})
    with sqlite3.connect(tmp_path / "run.db") as store:
        store.execute("UPDATE manifests SET episode_ids = '[' WHERE step = 3")
    with browse(tmp_path / "run.db") as connection:
        facts = store_facts(connection)
    assert [step for step in facts if "store/reward_correlation" in facts[step]] == [1, 2, 4, 5, 6, 7, 8]


async def test_a_disk_with_less_room_than_the_run_needs_is_a_finding(tmp_path, monkeypatch):
    await record(tmp_path)
    free = 300 * 2**20
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free})())
    assert examine(tmp_path).findings == ()
    saved = tmp_path / "checkpoints" / "step-000008" / "model"
    saved.mkdir(parents=True)
    (saved / "weights").write_bytes(b"0" * (45 * 2**20))
    (finding,) = examine(tmp_path).findings
    assert (finding.code, finding.episodes) == ("disk_fills", ())
    store = (tmp_path / "run.db").stat().st_size
    assert disk_facts(tmp_path, 8, 30)["disk/needed_bytes"] == pytest.approx(store / 8 * 22 + 45 * 2**20, rel=0.01)
    assert disk_facts(tmp_path, 30, 30) == {}


async def test_the_folder_of_a_job_of_equal_rewards_shows_them_as_the_job_said(tmp_path):
    job = ScriptedJob(tmp_path, config(steps=5), equal_rewards=True)
    job.folder.write_config(job.config)
    await job.run()
    (finding,) = examine(tmp_path).findings
    told = next(data for kind, data in job.events if kind == "warning")
    assert (finding.code, finding.since, finding.holds) == (told["code"], told["step"], True)
    assert f"{finding.seen}; {finding.remedy}" == told["text"]
    assert len(finding.episodes) == 4


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    with pytest.raises(NotFound):
        examine(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"palestra: {tmp_path} is not the folder of a run (it has no run.db)\n"


async def test_a_run_of_another_version_and_a_damaged_one_are_one_line(tmp_path, capsys):
    await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.execute(f"PRAGMA user_version = {version + 1}")
    with pytest.raises(StoreError, match="another version"):
        examine(tmp_path)
    (tmp_path / "run.db").write_bytes(b"no database" * 1000)
    assert main(["doctor", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


async def test_episodes_of_finished_steps_are_read_once(tmp_path, monkeypatch):
    await record(tmp_path)
    kept, config = examination.Examined(), load_config(tmp_path / "config.toml")
    read: list[list[int]] = []

    def counted(connection, after, until):
        found = store_facts(connection, after, until)
        read.append(list(found))
        return found

    monkeypatch.setattr(examination, "store_facts", counted)

    async def fail(step: int, finished: bool) -> None:
        with open_store(tmp_path, FakeClock()) as store:
            await store.groups.register("train", step, step, Task(task_id=f"t{step}", data={}), 6)
            for sample in range(6):
                name = f"train-{step:06d}-0{sample}"
                claimed = await store.episodes.claim("w", name, None, name)
                await store.episodes.abort(claimed.episode_id, claimed.fence, "agent_failed: -", True)
            if finished:
                row = run_of(step)[-1]
                await store.log.put_metrics(step, {k: v for k, v in row.items() if k[:4] not in ("stor", "disk")})

    def both() -> list[str]:
        with browse(tmp_path / "run.db") as connection:
            found, fresh = (examination.examine_store(connection, config, tmp_path, facts) for facts in (kept, None))
        assert found == fresh
        return [finding.code for finding in found.findings]

    assert both() == []
    await fail(9, finished=False)
    assert both() == []
    await fail(10, finished=True)
    assert both() == ["workers_fail"]
    assert [steps for steps in read[::2]] == [list(range(1, 9)), [], [9, 10]]
    with open_store(tmp_path, FakeClock()) as store:
        await store.log.restore_metrics(8)
    assert both() == []
    assert read[-2] == list(range(1, 9)), "a job that was resumed is read anew"


async def test_damaged_rows_leave_the_rest(tmp_path):
    await record(tmp_path, lambda step: {"rollout__context_full_share": 1.0})
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute("UPDATE episodes SET rewards = '{' WHERE episode_id = 'train-000008-02'")
        connection.execute("UPDATE episodes SET attempts = 'x' WHERE episode_id = 'train-000007-02'")
    (finding,) = examine(tmp_path).findings
    assert finding.episodes == ("train-000008-00", "train-000008-01", "train-000008-03")
