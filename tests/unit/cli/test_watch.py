"""`palestra watch` of a run's folder: what it prints, when it ends, and its exit code."""

from __future__ import annotations

import pytest

from palestra.cli import watch_run
from palestra.cli.event_lines import describe, trained_of_several
from palestra.cli.main import main
from palestra.config import dump_config, parse_config
from palestra.runtime.run_dir import is_running, starting_in
from unit.building import open_store

STEP = {"step": 3.0, "train/reward_mean": 0.5, "time/step_seconds": 2.0}


@pytest.fixture
async def write(tmp_path):
    """Writes a run with these events, and returns its folder."""

    async def written(*events, **settings):
        config = parse_config(
            {"name": "watched", "engine": {"kind": "fake"}, "run_dir": str(tmp_path / "run")} | settings
        )
        with open_store(tmp_path / "run") as store:
            for kind, data in events:
                await store.log.add_event(kind, data)
        (tmp_path / "run" / "config.toml").write_text(dump_config(config))
        return tmp_path / "run"

    return written


async def test_a_run_that_completed_is_told_from_its_beginning(write, capsys):
    folder = await write(
        ("running", {"step": 0, "version": "0.0"}),
        ("step", STEP),
        ("warning", {"code": "no_calls", "step": 3, "text": "no call was\nmade"}),
        ("saved", {"step": 3, "path": "x", "seconds": 0.1}),
        ("completed", {"step": 3}),
    )
    assert main(["watch", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"watched: 30 steps, {folder}",
        "running",
        "step    3   reward   0.50      2.0 s",
        "warning: no call was made",
        "saved after step 3",
        "completed after step 3",
    ]


async def test_the_policy_of_a_step_is_named_where_there_are_several(write, capsys):
    policies = {"policies": {"white": {}, "black": {"frozen": True}}}
    folder = await write(("step", STEP), ("completed", {"step": 3}), **policies)
    assert main(["watch", str(folder)]) == 0
    assert "step    3   white reward   0.50" in capsys.readouterr().out
    assert trained_of_several({"policies": {"a": {}}}) == trained_of_several({}) == ""
    assert trained_of_several({"policies": {"b": {"frozen": True}, "a": {}}}) == "a"
    assert describe("step", {"step": 0, "validation/reward_mean": 0.25}, "a") == "step    0   validation  0.25"


async def test_a_run_that_failed_or_was_stopped_has_another_exit_code(write, capsys):
    assert main(["watch", str(await write(("running", {"step": 2}), ("failed", {"reason": "no\nroom"})))]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["running, after step 2", "failed: no room"]


async def test_a_run_that_no_process_runs_is_not_waited_for(write, capsys):
    folder = await write(("running", {"step": 0}))
    assert not is_running(folder)
    assert main(["watch", str(folder)]) == 1
    assert "no process runs this job now; go on with it by --resume, or resume=True" in capsys.readouterr().out


async def test_a_run_is_followed_while_a_process_runs_it(write, capsys, monkeypatch):
    folder = await write(("running", {"step": 0}))
    (folder / ".lock").touch()
    looks = []
    with starting_in(folder) as start:
        assert is_running(folder)
        start.succeeded = True
        monkeypatch.setattr(watch_run.time, "sleep", lambda _: looks.append(0) or (len(looks) > 2 and stop()))

        def stop():
            raise KeyboardInterrupt

        assert main(["watch", str(folder)]) == 130
    assert not is_running(folder)
    assert len(looks) == 3
    assert "the job continues" in capsys.readouterr().out


def test_of_several_policies_each_has_its_reward_and_its_checkpoint():
    config = {"policies": {"white": {}, "black": {}, "old": {"frozen": True}}}
    assert trained_of_several(config) == ""
    row = {"step": 3.0, "white/train/reward_mean": 0.5, "black/train/reward_mean": -0.5, "time/step_seconds": 2.0}
    assert describe("step", row, "") == "step    3   white reward   0.50   black reward  -0.50      2.0 s"
    row |= {"white/validation/reward_mean": 1.0}
    assert "white validation  1.00" in describe("step", row, "")
    assert describe("saved", {"step": 3, "policy": "black"}, "") == "black saved after step 3"
    assert describe("saved", {"step": 3, "policy": "white"}, "white") == "saved after step 3"


@pytest.mark.parametrize("kind", ["engine_worker_lost", "trainer_lost", "base_lost"])
def test_what_a_job_has_lost_is_a_line(kind):
    text = "inference worker 1 was killed by SIGKILL; another one is started"
    assert describe(kind, {"step": 3, "text": text}, "a") == text
