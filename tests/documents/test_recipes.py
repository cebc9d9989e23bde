"""Every recipe runs, for a step and with a model of random weights where learning is not the subject."""

from __future__ import annotations

import asyncio
import inspect
import re
import runpy
import sqlite3
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from frameworks.playing import PEERS, missing
from machine import require

from documents.blocks import ROOT
from documents.recipes import RECIPES, run
from palestra import check_environment

SMALL = ("--steps", "1", "--model", "tiny-random")
IN_ONE_PROCESS = (
    "addition",
    "black_box_agent",
    "judged_answers",
    "mixture",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("calculator", "frozen_lake", "gomoku")),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("gomoku_self_play", "own_environment", "subagents")),
)
OTHERS = ("find_shape", "framework_agent", "miniwob", "kuhn_poker", "negotiation_seats", "resume", "service")
OTHERS += ("click_by_sight", "terminal", "harbor_agents", "harness_tool", "support_bot")


def test_every_recipe_is_run():
    alone = [name if isinstance(name, str) else name.values[0] for name in IN_ONE_PROCESS]
    assert sorted(RECIPES) == sorted((*alone, *OTHERS))


@pytest.mark.parametrize("name", RECIPES)
def test_it_says_what_to_change_and_is_short(name):
    text = RECIPES[name].read_text()
    assert set(re.findall(r"YOURS (\d)", text)) == {"1", "2", "3"}
    assert f"python recipes/{name}.py" in text
    assert len(text.splitlines()) <= 125
    assert f"]({name}.py)" in (ROOT / "recipes" / "README.md").read_text()


def test_the_demo_pays_nothing_for_an_answer_that_is_cut():
    reward = runpy.run_path(str(RECIPES["addition"]))["reward"]
    task = {"a": 8, "b": 11}
    ended = [reward(task, answer, end) for answer in ("19", "8 + 11 = 19.", "18") for end in ("stop", "length")]
    assert ended == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert "finish_reason" in inspect.signature(reward).parameters  # `train(reward=…)` fills it by its name


def test_the_demo_shows_what_changed_and_how_to_remove_what_it_left(tmp_path, monkeypatch, capsys):
    said = {"1+2": [("4", "stop", 0.0), ("3", "stop", 1.0)], "2+2": [("4", "stop", 1.0), ("4, for", "length", 0.0)]}
    said["5+5"] = [("10", "stop", 1.0)] * 2
    episodes = [
        SimpleNamespace(task_id=task, rewards={"agent": reward}, metadata={"answer": answer, "finish_reason": end})
        for place in (0, 1)
        for task, answer, end, reward in ((task, *each[place]) for task, each in said.items())
    ]
    monkeypatch.setattr("palestra.read_episodes", lambda folder, kind: episodes)
    folder = tmp_path / "my runs"
    folder.mkdir()
    runpy.run_path(str(RECIPES["addition"]))["print_change"](SimpleNamespace(run_dir=folder))
    out = capsys.readouterr().out
    assert "2 of 3 right before, 2 after; 2 changed" in out
    shown = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if " = " in line]
    assert shown == [["1+2 = 3", "'4' wrong", "'3' right"], ["2+2 = 4", "'4' right", "'4, for' cut"]]
    assert f"rm -r '{folder}' removes them" in out
    assert f"palestra episodes '{folder}' --kind validation --limit 3" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_it_trains_a_step(name, tmp_path):
    done = run(name, tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    (_,) = tmp_path.glob("runs/*/checkpoints/step-000001/model.safetensors")


@pytest.mark.long
def test_a_model_that_sees_is_trained_on_pictures_of_several_turns(tmp_path):
    done = run("find_shape", tmp_path, "--steps", "1", "--model", "tiny-random-vision")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    assert len(list(tmp_path.glob("runs/find-shape/pictures/??/*"))) > 16


def test_a_shape_can_be_found_in_four_looks_and_without_seeing_once_in_four():
    recipe = runpy.run_path(str(RECIPES["find_shape"]))
    canvas, drawn = recipe["Canvas"], recipe["drawn"]
    check_environment(canvas, [{"seed": seed} for seed in range(3)], actions=["n", "c"])
    seen, blind = canvas(), canvas(blindfolded=True)
    guessed, looks, found = 0.0, [], []
    for seed in range(200):
        (window, name), _ = seen.reset({"seed": seed})
        assert name == "cross"
        while not _is_cross(window):
            (window, _), reward, terminated, *_ = seen.step("n")
            assert (reward, terminated) == (0.0, False)
        _, reward, terminated, truncated, info = seen.step("c")
        found.append((reward, terminated, truncated))
        looks.append(info["looks"])
        (window, _), _ = blind.reset({"seed": seed})
        assert window.max() == 0
        guessed += blind.step("c")[1]
    assert set(found) == {(1.0, True, False)}
    assert set(looks) == {1, 2, 3, 4}
    assert 0.15 < guessed / 200 < 0.35
    named = canvas(named=True)
    wanted = [named.reset({"seed": seed})[0][1] for seed in range(200)]
    assert all(35 < wanted.count(shape) < 65 for shape in recipe["SHAPES"])
    for _ in range(named.shapes.index(wanted[-1])):
        named.step("n")
    assert named.step("c")[1] == 1.0
    seen.reset({"seed": 0})
    assert [seen.step("n")[2] for _ in range(4)] == [False, False, False, True]
    inked = {shape: int((drawn(shape, 16, 16, 6) > 0).sum()) for shape in recipe["SHAPES"]}
    assert inked["square"] == 13**2
    assert inked["disc"] == pytest.approx(np.pi * 36, rel=0.05)
    assert inked["triangle"] == pytest.approx(13**2 / 2, rel=0.1)
    assert inked["cross"] == 2 * 13 * 3 - 9


def _is_cross(window: np.ndarray) -> bool:
    """Whether rows in the upper and in the lower quarter of what is drawn are as narrow as each other, and narrow."""
    rows = [int(row.sum()) // 255 for row in window if row.any()]
    upper, lower = rows[len(rows) // 8], rows[-1 - len(rows) // 8]
    return upper == lower and upper < max(rows) / 2


@pytest.mark.long
@pytest.mark.parametrize("against", ["self", "frozen", "shared"])
def test_two_policies_are_measured_against_the_truth(against, tmp_path):
    done = run("kuhn_poker", tmp_path, "--steps", "2", "--model", "tiny-random", "--against", against)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^ +768  +([\d.]+)  +([\d.]+)  +(-?[\d.]+)  +(-?[\d.]+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert 0.2 < float(found[1]) < 0.8
    assert ("a best response" in done.stdout) == (against == "frozen")


@pytest.mark.long
def test_a_run_that_was_killed_is_continued(tmp_path):
    done = run("resume", tmp_path, "--steps", "4", "--model", "tiny-random")
    assert done.returncode == 0, done.stdout + done.stderr
    killed = re.search(r"killed when (\d) of 4 steps", done.stdout)
    assert killed is not None
    assert 2 <= int(killed[1]) <= 4
    assert "steps trained: 1, 2, 3, 4;" in done.stdout


@pytest.mark.browser
def test_web_pages_are_trained_on(tmp_path):
    require("chromium", packages=("miniwob",))
    done = run("miniwob", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout


@pytest.mark.long
@pytest.mark.browser
def test_web_pages_are_trained_on_by_their_pixels(tmp_path):
    require("chromium", packages=("miniwob",))
    done = run("click_by_sight", tmp_path, "--steps", "1", "--model", "tiny-random-vision")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    assert len(list(tmp_path.glob("runs/click-by-sight/pictures/??/*"))) == 32 + 64  # one of each problem


@pytest.mark.long
def test_a_shell_is_trained_on(tmp_path):
    require("bwrap", "git")
    done = run("terminal", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout


@pytest.mark.long
def test_a_program_with_one_tool_is_trained_on_tasks_of_harbor(tmp_path):
    require("podman", "runc", "busybox", "git")
    done = run("harness_tool", tmp_path, *SMALL, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    assert "on 5 tasks" in done.stdout


@pytest.mark.slow
async def test_a_script_of_the_tool_solves_each_task_and_another_does_not(tmp_path):
    require("podman", "runc", "busybox")
    recipe = runpy.run_path(str(RECIPES["harness_tool"]))
    solved = {"add": 0, "greet": 1, "count-errors": 2, "shout": 3, "mend-larger": 4}

    async def paid(task, number) -> float:
        place = tmp_path / f"{task['id']} {number}"
        place.mkdir()
        (place / "run.sh").write_text(recipe["SCRIPTS"][number] + "\n")
        return await recipe["score"](task, SimpleNamespace(workspace=place))

    tasks = recipe["tasks"]()
    assert await asyncio.gather(*(paid(task, solved[task["id"]]) for task in tasks)) == [1.0] * 5
    assert await asyncio.gather(*(paid(task, 5) for task in tasks)) == [0.0] * 5
    assert len(recipe["verdicts"]) == 10


HARBOR = """
import asyncio, os, pathlib
from types import SimpleNamespace

DIED = pathlib.Path("died")

class TrialConfig(dict):
    model_validate = classmethod(lambda cls, data: cls(data))

class Trial:
    @classmethod
    async def create(cls, config):
        made = cls()
        made.config = config
        return made

    async def run(self):
        import openai
        if not DIED.exists():
            DIED.touch()
            os._exit(1)  # its trials are played again by the next child
        agent = self.config["agent"]
        url, key = agent["kwargs"]["api_base"], agent["env"]["OPENAI_API_KEY"]
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            said = [{"role": "user", "content": "hi"}]
            model = agent["model_name"].removeprefix("openai/")
            await client.chat.completions.create(model=model, messages=said, max_tokens=4)
        print("Harbor prints")
        result = SimpleNamespace(rewards={"reward": 0.5})
        return SimpleNamespace(verifier_result=result, exception_info=None)
"""


@pytest.mark.slow
def test_trials_of_another_python_are_episodes(tmp_path):
    """Both halves of the recipe, with two classes in the place of Harbor's."""
    for name in ("harbor", "harbor/models", "harbor/models/trial", "harbor/trial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in ("harbor/models/trial/config.py", "harbor/trial/trial.py"):
        (tmp_path / name).write_text(HARBOR)
    (tmp_path / "tasks" / "one").mkdir(parents=True)
    (tmp_path / "tasks" / "one" / "task.toml").touch()
    done = run("harbor_agents", tmp_path, *SMALL, PALESTRA_HARBOR_PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 episodes were trials of Harbor" in done.stdout
    assert "reward  0.50" in done.stdout


@pytest.mark.long
def test_two_processes_play_the_seats_of_every_game(tmp_path):
    done = run("negotiation_seats", tmp_path, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    earned = re.findall(r"^(first|second): (\d\.\d\d) a game, of 8 games$", done.stdout, re.MULTILINE)
    assert [role for role, _ in earned] == ["first", "second"]


def test_users_of_the_support_bot_like_short_polite_replies_that_name_the_right_department():
    liked = runpy.run_path(str(RECIPES["support_bot"]))["satisfaction"]
    assert liked("billing", "Sorry! Billing will help you.") == pytest.approx(1.0)
    assert liked("returns", "Sorry! Billing will help you.") == pytest.approx(0.6)
    assert liked("returns", "Sorry! Billing or returns.") == pytest.approx(0.8)
    assert liked("returns", "returns " + "so " * 13) == pytest.approx(0.4 + 0.3 / 2)
    assert liked("returns", "so " * 30) == liked("returns", "") == 0.0


@pytest.mark.slow
def test_a_live_run_learns_from_simulated_users_behind_a_gate(tmp_path):
    done = run("support_bot", tmp_path, "--sessions", "240", "--model", "tiny-random")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"first 200 sessions: 0\.\d\d, last 200: 0\.\d\d; see runs/support", done.stdout)
    (folder,) = (path for path in tmp_path.glob("runs/*") if path.is_dir())
    assert folder.with_suffix(".png").stat().st_size > 10_000
    assert "step      1/" in folder.with_suffix(".log").read_text()
    with sqlite3.connect(folder / "live.db") as live:
        consent = dict(live.execute("SELECT train, count(*) FROM sessions GROUP BY train"))
        given = live.execute("SELECT count(*), count(DISTINCT session_id) FROM feedback").fetchone()
    assert consent[1] + consent[0] == 240
    assert 0 < consent[0] < 50
    assert given[0] == given[1] < consent[1]


def test_without_its_framework_a_recipe_says_what_to_install(tmp_path):
    (tmp_path / "langchain_core.py").write_text("raise ModuleNotFoundError('No module named langchain_core')\n")
    done = run("framework_agent", tmp_path, *SMALL, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().endswith("This recipe needs LangGraph:  pip install langgraph langchain-openai")


@pytest.mark.frameworks
@pytest.mark.skipif(missing() is not None, reason=f"{missing()}; `make frameworks` makes it")
def test_the_recipe_with_a_framework(tmp_path):
    (packages,) = PEERS.glob("frameworks/lib/python3*/site-packages")
    done = run("framework_agent", tmp_path, *SMALL, PYTHONPATH=str(packages))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout


@pytest.mark.service
@pytest.mark.timeout(400)
def test_the_recipe_with_a_service(tmp_path):
    done = run("service", tmp_path, *SMALL, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: reward" in done.stdout
    assert "completed; its curve is in curve.png" in done.stdout
    assert (tmp_path / "curve.png").stat().st_size > 0
