"""`palestra environments`: one that ships, and one of the user's own, from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.cli.main import main

NIM = '''
"""A game of stones."""

from palestra import MultiAgentEnvironment, Outcome

SIZE = 3


class Nim(MultiAgentEnvironment):
    """Who takes the last stone wins."""

    roles = ("alice", "bob")
    zero_sum = True
    reusable = True
    gives_choices = True

    def begin(self, task):
        self.pile = int(task["pile"])

    def view(self, role):
        return str(self.pile)

    def legal(self, role):
        return ("1", "2")[: self.pile]

    def apply(self, actions):
        ((role, action),) = actions.items()
        self.pile -= int(action.text)
        other = "bob" if role == "alice" else "alice"
        return Outcome(rewards={role: 1.0, other: -1.0}, over=True) if self.pile == 0 else None
'''


@pytest.fixture
def nim(tmp_path) -> Path:
    path = tmp_path / "nim.py"
    path.write_text(NIM)
    return path


def test_one_of_the_users_own_is_shown(nim, capsys):
    assert main(["environments", f"{nim}:Nim", "--task", '{"pile": 5}']) == 0
    shown = capsys.readouterr().out
    assert "Who takes the last stone wins." in shown
    assert "roles:     alice, bob" in shown
    assert "[user]\n5\n\nchoices:   1, 2" in shown


def test_the_protocol_of_one_of_the_users_own_is_drawn(nim, capsys):
    assert main(["environments", f"{nim}:Nim", "--protocol", "--task", '{"pile": 5}']) == 0
    shown = capsys.readouterr().out
    assert "alice, bob; rewards add up to 0" in shown
    assert "one after another: alice, bob, until the episode ends" in shown


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Nim", [], "KeyError: 'pile' (nim.py:18, in begin); the task was {}: give one that it can play, as in --task"),
        ("Nim", ["--task", "{"], "--task {: Expecting property name"),
        ("Nim", ["--task", "3"], "a task is a JSON object, such as {}"),
        ("Nam", [], "nim.py has no 'Nam'"),
        ("SIZE", [], "SIZE is a int, and not the class of an environment"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(nim, capsys, name, more, said):
    assert main(["environments", f"{nim}:{name}", *more]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(("name", "roles"), [("kuhn-poker", "first, second"), ("gomoku-duel", "agent, opponent")])
def test_one_that_ships_is_shown_with_its_roles(name, roles, capsys):
    assert main(["environments", name]) == 0
    assert f"roles:     {roles}\n" in capsys.readouterr().out


def test_one_that_is_right_and_one_that_is_wrong_are_checked(nim, capsys):
    assert main(["environments", "check", "arithmetic"]) == 0
    assert capsys.readouterr().out.endswith("4 of 4 tasks are right\n")
    assert main(["environments", "check", f"{nim}:Nim", "--task", '{"pile": 2}']) == 0
    nim.write_text(NIM.replace("other: -1.0", "other: 0.0"))
    assert main(["environments", "check", f"{nim}:Nim", "--task", '{"pile": 2, "id": "two"}']) == 1
    assert "two: wrong: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check"], "name the environment to check"),
        (["gomoku", "nim"], "one argument too many"),
        (["check", "gomuku"], "did you mean 'gomoku'"),
        (["check", "gomoku", "--settings", '{"size": 1}'], "can't be played"),
    ],
)
def test_what_can_not_be_checked_is_said(arguments, said, capsys):
    assert main(["environments", *arguments]) == 2
    assert said in capsys.readouterr().err


GYMNASIUM = """
import gymnasium

class Corridor(gymnasium.Env):
    '''A corridor.'''
    observation_space, action_space = gymnasium.spaces.Discrete(4), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

def corridor():
    return Corridor()
"""


@pytest.mark.parametrize("name", ["FrozenLake-v1", "halls.py:Corridor", "halls.py:corridor"])
def test_one_of_gymnasium_is_shown_by_its_name_its_class_or_what_makes_it(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "halls.py").write_text(GYMNASIUM)
    monkeypatch.chdir(tmp_path)
    assert main(["environments", name]) == 0
    assert "[user]" in capsys.readouterr().out
    assert main(["environments", "FrozenLak-v1"]) == 2
    assert "Did you mean: `FrozenLake`" in capsys.readouterr().err
