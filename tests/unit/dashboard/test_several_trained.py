"""A run that has trained two policies, in every view: each shows both, and none fails."""

from __future__ import annotations

import json

import pytest

from palestra.cli.main import main
from palestra.config import dump_config
from palestra.dashboard.episode import episode_answer, read_reading
from palestra.dashboard.progress import describe_run, read_columns, read_settings
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import read_group, read_step
from palestra.doctor.examination import examine
from palestra.learner.reporting import RunFolder
from unit.learner.scripted_job import ScriptedJob, config

ROLES = {"opponent": "black"}


@pytest.fixture
async def folder(tmp_path):
    """Of a finished run; black is updated in every second step."""
    policies = {"white": {}, "black": {"updates": {"every_steps": 2}, "algorithm": {"name": "rloo"}}}
    settings = config(policies=policies, roles=ROLES, run_dir=str(tmp_path))
    await ScriptedJob(tmp_path, settings).run()
    (tmp_path / "config.toml").write_text(dump_config(settings))
    return tmp_path


async def test_the_page_has_the_rewards_and_the_curves_of_both(folder):
    run = Run(name="duel", folder=folder)
    answer = describe_run(run)
    assert answer.reward is None
    assert answer.rewards.keys() == answer.validations.keys() == {"white", "black"}
    columns = read_columns(run, -1)
    assert {"white/train/reward_mean", "black/train/reward_mean"} <= columns.columns.keys()
    assert columns.units["white/train/reward_mean"] == columns.units["train/reward_mean"] == "reward"
    assert columns.formulas["black/train/entropy"] == columns.formulas["train/entropy"]
    assert "policies.black.updates.every_steps" in read_settings(run).changed


async def test_a_step_a_group_and_an_episode_say_whose_tokens_are_trained(folder):
    run = Run(name="duel", folder=folder)
    assert read_step(run, 2).versions.keys() == {"white", "black"}
    whys = set()
    for step, due in ((1, True), (2, False)):
        (group, *_) = read_step(run, step).groups
        assert read_group(run, "train", group.group_index).members
        for line in group.episodes:
            reading = read_reading(run, line.episode_id)
            answer = episode_answer(run, reading)
            whys.add(answer.why)
            by_policy = reading.fates.by_policy
            assert by_policy.keys() == {"white", "black"}
            assert ("is not updated in it" in by_policy["black"].why) == (not due)
            of_call = {chat.policy: reading.fates.of_call(chat.index) for chat in reading.view.trajectory.chats}
            assert of_call["white"].trained == by_policy["white"].trained
            assert of_call["black"].trained == by_policy["black"].trained
    assert any("black: in the batch of step 2, not trained: the policy black is not updated in it" in w for w in whys)


async def test_an_episode_of_two_policies_has_one_loss_weight_only_where_both_weigh_its_tokens_alike(tmp_path):
    """The policies of a token have loss weights of their own, and none of them is that of the episode."""
    policies = {"white": {"algorithm": {"name": "rloo", "loss_agg_mode": "token-mean"}}, "black": {}}
    settings = config(policies=policies, roles=ROLES, run_dir=str(tmp_path))
    await ScriptedJob(tmp_path, settings).run()
    (tmp_path / "config.toml").write_text(dump_config(settings))
    run, seen = Run(name="duel", folder=tmp_path), set()
    for group in read_step(run, 1).groups:
        for member in read_group(run, "train", group.group_index).members:
            credits = read_reading(run, member.line.episode_id).credits
            known = {credit.weights[member.line.episode_id] for credit in credits.values()} - {None}
            seen.add(len(known))
            assert member.weight == (known.pop() if len(known) == 1 else None)
    assert 2 in seen


async def test_the_commands_show_both(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "white reward" in shown
    assert "black validation" in shown
    assert main(["episodes", str(folder)]) == 0
    assert main(["episodes", str(folder), "train-000000-00"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(folder), "--json"]) in (0, 1)
    assert {one["policy"] for one in json.loads(capsys.readouterr().out)["findings"]} <= {"", "white", "black"}


async def test_findings_are_those_of_the_rows_of_each(folder):
    found = examine(folder)
    assert found.step == 3
    # The fake trainer measures ratios of 0 and gradients of 0, in each step in which a policy is updated.
    assert {(one.policy, one.steps) for one in found.findings if one.code == "no_gradient"} <= {
        ("white", 3),
        ("black", 2),
    }
    assert {one.policy for one in found.findings} & {"white", "black"}


async def test_the_picture_of_several_policies_is_drawn(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    RunFolder(folder).draw_curve(rows, "duel")
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
