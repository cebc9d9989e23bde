"""A game whose players both get the reward of the winner: the doctor names it, and says nothing of the true game."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_two_policies import config

import palestra
from palestra import Agent, RolloutSpec
from palestra.doctor.examination import examine
from palestra.types.messages import text_message
from palestra_worlds.gomoku import GomokuDuel

PAST = {"opponent": {"policy": "white", "pool": {"every_steps": 2, "size": 2}}}
PLACES = [f"{row} {column}" for row in (1, 2, 3) for column in (1, 2, 3)]


class Legal(Agent):
    """One of the free places."""

    async def step(self, observation, policy):
        board = observation.content[-1].text.splitlines()[-3:]
        free = [place for place in PLACES if board[int(place[0]) - 1][int(place[2]) - 1] == "."]
        chat = await policy.chat((text_message("user", "\n".join(board)),), choices=free, max_tokens=4)
        return [chat], chat.reply


class AllWin(GomokuDuel):
    """The planted bug: both get the winner's reward."""

    def emit(self, agent, content, **more):
        if more.get("terminated") and more.get("reward") == 0.0:
            more["reward"] = 1.0
        return super().emit(agent, content, **more)


def played(folder: Path, environment: type[GomokuDuel]) -> set[str]:
    settings = config(folder, {}, PAST, steps=5, deterministic=False, rollout={"group_size": 8, "groups_per_step": 4})
    tasks = [{"id": f"t{n}", "first": ("agent", "opponent")[n % 2]} for n in range(20)]
    result = palestra.train(RolloutSpec(environment=environment, agents={"": Legal()}), tasks, settings, quiet=True)
    return {finding.code for finding in examine(result.run_dir).findings}


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "named"), [(AllWin, True), (GomokuDuel, False)])
def test_both_opponents_paid_like_the_winner_are_named(tmp_path, environment, named):
    found = played(tmp_path / "run", environment)
    assert ("opponents_paid_alike" in found) == named
    assert not {"opponents_collapse", "opponents_oscillate"} & found
