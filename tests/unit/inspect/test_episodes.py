"""`palestra episodes --json`: what programs read is what the page shows."""

from __future__ import annotations

import asyncio
import json
import sqlite3

import pytest

from palestra.cli.main import main
from palestra.store import browsing
from palestra_inspect import episode_view, folder_run
from palestra_inspect.episode_list import episode_lines
from unit.dashboard.recorded import REWARDS, record

pytestmark = pytest.mark.ci


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


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ({"agent": 0.5}, "0.5"),
        ({"black": 1.0, "white": -1.0}, "black 1, white -1"),
        ({f"a-{n}": 1.0 for n in range(6)}, "a-0 1, a-1 1, a-2 1, a-3 1, … (6 agents)"),
        ({"a\x1b[2Jb\nc": 1.0, "d": 0.0}, "d 0"),
    ],
)
def test_the_rewards_of_several_agents_are_listed_by_agent(folder, capsys, monkeypatch, rewards, shown):
    monkeypatch.setenv("COLUMNS", "200")
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("UPDATE episodes SET rewards = ? WHERE kind = 'train'", (json.dumps(rewards),))
    for words in (["episodes", str(folder), "--kind", "train"], ["top", str(folder), "--once"]):
        assert main(words) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("train-"))
        assert shown in line
        assert "\x1b" not in line
    assert main(["episodes", str(folder), "train-000000-00"]) == 0
    assert ("d earned 0" in capsys.readouterr().out) == ("d" in rewards)


@pytest.mark.parametrize("state", [(), ("--state", "completed")])
def test_a_file_or_pipe_gets_all_episodes_a_piece_at_a_time(folder, capsys, monkeypatch, state):
    wanted = lines(capsys, folder, *state, "--limit", "1000")
    pieces, listed = [], folder_run.readable_summaries

    def counted(connection, rows):
        pieces.append(len(rows))
        assert len(capsys.readouterr().out.splitlines()) == (0 if len(pieces) == 1 else 2)
        return listed(connection, rows)

    monkeypatch.setattr(browsing, "PIECE", 2)
    monkeypatch.setattr(folder_run, "readable_summaries", counted)
    monkeypatch.setattr(episode_view, "LISTED", 3)
    assert main(["episodes", str(folder), *state, "--json"]) == 0
    capsys.readouterr()
    assert sum(pieces) == len(wanted) > 6
    assert max(pieces) == 2
    monkeypatch.setattr(folder_run, "readable_summaries", listed)
    assert lines(capsys, folder, *state) == wanted
    assert len(lines(capsys, folder, "--limit", "4")) == 4
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert len(lines(capsys, folder)) == 3


def test_a_list_that_is_cut_says_so(folder, capsys):
    assert main(["episodes", str(folder), "--limit", "2"]) == 0
    assert "the newest 2" in capsys.readouterr().out
    assert main(["episodes", str(folder)]) == 0
    assert "the newest" not in capsys.readouterr().out


def test_the_list_has_the_step_that_trained_each_episode(folder, capsys):
    with sqlite3.connect(folder / "run.db") as connection:
        names = json.dumps([f"train-00000{g}-0{s}" for g in range(3) for s in range(3) if (g, s) != (2, 1)])
        connection.execute("UPDATE manifests SET episode_ids = ?", (names,))
        connection.execute("INSERT INTO manifests SELECT 6, '{', seed, config_digest, versions FROM manifests")
    assert main(["episodes", str(folder), "--kind", "train"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    end = header.index("trained in") + len("trained in")
    steps = {line.split()[0]: line[:end].rpartition("  ")[2].strip() for line in lines}
    assert steps.pop("train-000002-01") == ""
    assert set(steps.values()) == {"5"}
    assert main(["episodes", str(folder), "--kind", "validation"]) == 0
    assert "trained in" not in capsys.readouterr().out


def test_the_list_says_how_many_replies_were_cut(folder, capsys):
    assert main(["episodes", str(folder)]) == 0
    assert " cut " not in capsys.readouterr().out
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("UPDATE chats SET finish_reason = 'length' WHERE episode_id = 'train-000000-01'")
    assert main(["episodes", str(folder), "--kind", "train"]) == 0
    header, *found = capsys.readouterr().out.splitlines()
    end = header.index("cut") + len("cut")
    assert {line.split()[0]: line[:end].rpartition("  ")[2].strip() for line in found}["train-000000-01"] == "2"
    assert [one["cut"] for one in lines(capsys, folder, "--kind", "train")][:3] == [0, 2, 0]


@pytest.mark.parametrize("width", [80, 100])
def test_the_list_fits_into_a_terminal_with_an_ellipsis_where_it_is_cut(folder, width):
    with browsing.browse(folder / "run.db") as connection:
        rows = browsing.list_episodes(connection, None, None, 40)
    lines = [line.plain for line in episode_lines(rows, 0.0, width)]
    assert max(map(len, lines)) <= width
    whole = sum("1 edited message" in line for line in lines)
    assert (whole, sum("…" in line for line in lines) > 0) == ((3, False) if width == 100 else (0, True))
    assert all(name in lines[0] for name in ("episode", "task", "state", "reward", "attempts", "forks"))


def test_one_episode_has_its_calls_and_why_it_was_trained(folder, capsys):
    (found,) = lines(capsys, folder, "train-000000-01")
    assert (found["trained"], len(found["calls"])) == (True, 2)
    assert found["calls"][1]["fork"]["reason"] == "edited_message"
