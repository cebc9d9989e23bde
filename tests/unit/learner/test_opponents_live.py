"""Games of two policies that go wrong while the job runs: its warnings are the doctor's, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from palestra.doctor.examination import examine
from unit.learner.scripted_job import ScriptedJob, config

GROUPS = 12
Game = Callable[[int, int], tuple[float, float]]  # rewards of agent and opponent, by step and number of the episode


def collapses(step: int, number: int) -> tuple[float, float]:
    won = 1.0 if step > 3 or number % 2 else -1.0
    return won, -won


def oscillates(step: int, number: int) -> tuple[float, float]:
    won = 1.0 if ((step - 1) // 3) % 2 or not number % (2 * GROUPS) else -1.0
    return won, -won


def rises(step: int, number: int) -> tuple[float, float]:
    won = 1.0 if number % 2 else -1.0
    return (won, -won) if step < 6 else (0.5, 0.5)


def goes_well(step: int, number: int) -> tuple[float, float]:
    won = 1.0 if (number + step) % 3 else -1.0
    return won, -won


def job_of(folder, game: Game, steps: int, **changes) -> ScriptedJob:
    """A job of two policies whose agents earn what the game says."""
    given = {
        "policies": {"white": {}, "black": {}},
        "roles": {"opponent": "black"},
        "steps": steps,
        "rollout": {"group_size": 2, "groups_per_step": GROUPS, "max_attempts": 5},
        "evaluation": {"every_steps": 0},
    }
    job = ScriptedJob(folder, config(**given | changes))
    really_end = job.store.episodes.end

    async def end(episode_id, fence, handed_in):
        _, group, sample = episode_id.split("-")
        step, number = int(group) // GROUPS + 1, int(group) * 2 + int(sample)
        agent, opponent = game(step, number)
        return await really_end(episode_id, fence, replace(handed_in, rewards={"agent": agent, "opponent": opponent}))

    job.store.episodes.end = end
    return job


def said(job: ScriptedJob) -> list[tuple[str, int, str]]:
    warnings = [data for kind, data in job.events if kind == "warning"]
    return [(one["code"], one["step"], one["policy"]) for one in warnings if one["code"].startswith("opponents_")]


CASES = [
    (collapses, "opponents_collapse", 16, "agent has won nearly every game of the last 10 steps"),
    (oscillates, "opponents_oscillate", 24, "took the lead from each other"),
    (rises, "opponents_rise", 9, "the rewards of both opponents rose"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("game", "code", "steps", "words"), CASES)
async def test_a_game_that_goes_wrong_is_a_warning_while_the_job_runs(tmp_path, game, code, steps, words):
    job = job_of(tmp_path, game, steps)
    await job.run()
    ((found, step, policy),) = said(job)
    assert (found, policy) == (code, "")
    (held,) = [warning for warning in job.progress.warnings if warning.code == code]
    assert words in held.text
    rows = {row["step"]: row for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())}
    assert rows[step]["train/warnings"] >= 1
    (finding,) = [finding for finding in examine(tmp_path).findings if finding.code == code]
    assert (finding.since, finding.holds) == (step, True)


@pytest.mark.slow
async def test_a_game_that_goes_well_brings_no_warning_of_opponents(tmp_path):
    job = job_of(tmp_path, goes_well, 25)
    await job.run()
    assert said(job) == []


@pytest.mark.slow
@pytest.mark.parametrize(("game", "code", "steps", "words"), CASES)
async def test_after_a_restart_the_warning_comes_in_the_same_step(tmp_path, game, code, steps, words):
    whole = job_of(tmp_path / "whole", game, steps)
    await whole.run()
    first = job_of(tmp_path / "job", game, steps)
    stop_after = said(whole)[0][1] - 1
    first.on_event = lambda kind, data: first.learner.stop() if kind == "step" and data["step"] == stop_after else None
    await first.run()
    assert said(first) == []
    second = job_of(tmp_path / "job", game, steps)
    await second.run()
    assert said(second) == said(whole) != []


@pytest.mark.slow
async def test_where_policies_take_turns_every_step_counts(tmp_path):
    """White is trained in odd steps and black in even ones: neither has seen ten steps when the job has."""
    turns = {"white": {"updates": {"every_steps": 2}}, "black": {"updates": {"every_steps": 2}}}
    plain = job_of(tmp_path / "plain", collapses, 16)
    in_turns = job_of(tmp_path / "turns", collapses, 16, policies=turns)
    await plain.run()
    await in_turns.run()
    assert said(in_turns) == said(plain) != []
