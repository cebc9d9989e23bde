"""`palestra episodes --json`: what programs read is what the page shows."""

from __future__ import annotations

import asyncio
import json

import pytest

from palestra.cli.main import main
from unit.dashboard.recorded import REWARDS, record


@pytest.fixture
def folder(tmp_path):
    asyncio.run(_recorded(tmp_path))
    return tmp_path


async def _recorded(folder) -> None:
    await record(folder)


def lines(capsys, *words: object) -> list[dict[str, object]]:
    assert main(["episodes", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_list_is_a_line_for_each_episode(folder, capsys):
    found = lines(capsys, folder, "--kind", "train")
    assert [one["reward"] for one in found] == [reward for rewards in REWARDS.values() for reward in rewards]
    assert lines(capsys, folder, "--state", "discarded") == []


def test_one_episode_has_its_calls_and_why_it_was_trained(folder, capsys):
    (found,) = lines(capsys, folder, "train-000000-01")
    assert (found["trained"], len(found["calls"])) == (True, 2)
    assert found["calls"][1]["fork"]["reason"] == "edited_message"
