"""Protocols as pictures of characters."""

from __future__ import annotations

import pytest

from palestra.cli.main import main
from palestra.envs import CATALOG, decided, free, phases, simultaneous, turns
from palestra_inspect.protocol_drawing import draw_protocol


def test_who_acts_when_and_where_the_barriers_are():
    parts = [simultaneous(rounds=2), turns(("a", "b"), rounds=1), free(actions=1)]
    assert draw_protocol(("a", "b"), phases(parts, repeat=True), width=36).splitlines() == [
        "1. at the same time: every role, 2 times",
        "2. one after another: a, b, once",
        "3. without an order: every role, once; then from the beginning",
        "",
        "   1       2       3   1",
        "a  ─●─┃─●─║─●─────║─○─║─●─┃─●─┃ …",
        "b  ─●─┃─●─║─────●─║─○─║─●─┃─●─┃ …",
        "",
        "● acts   ○ acts when it wants to",
        "┃ barrier: actions are revealed together   ║ barrier between phases",
    ]


def test_a_protocol_that_ends_has_an_end():
    assert draw_protocol(("a", "b"), turns(("b", "a"), rounds=1)).splitlines()[2:4] == ["a  ─────●──", "b  ─●──────"]


def test_what_the_world_decides_has_no_picture():
    assert draw_protocol(("a",), decided(lambda: ())) == "the rules of the world say who is next"


@pytest.mark.parametrize("count", [2, 16, 128])
def test_lines_fit_a_terminal(count):
    roles = tuple(f"a-role-with-a-very-long-name-{number}" for number in range(count))
    lines = draw_protocol(roles, simultaneous()).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24
    assert ("… and 112 more roles" in lines) == (count == 128)


@pytest.mark.parametrize("name", ["gomoku-duel", "kuhn-poker", "arithmetic"])
def test_the_command_draws_what_ships(name, capsys):
    main(["environments", name, "--protocol"])
    said = capsys.readouterr().out
    assert ("has no protocol" in said) == (name == "arithmetic")
    assert ("─●─" in said) == (name != "arithmetic")
    assert ("rewards add up to 0" in said) == (name == "kuhn-poker")
    assert name in CATALOG


def test_the_command_shows_legal_moves_and_wants_a_name_to_draw(capsys):
    main(["environments", "kuhn-poker"])
    assert "choices:   p, b" in capsys.readouterr().out
    assert main(["environments", "--protocol"]) != 0
    assert "NAME --protocol" in capsys.readouterr().err
