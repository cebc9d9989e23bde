"""OpenSpiel's games as environments: who acts, chance from the seed, and the game's own returns."""

from __future__ import annotations

import random

import pytest

from palestra.envs.catalog import catalog_maker
from palestra.errors import ConfigError
from palestra_inspect.environment_check import check_environment
from palestra_worlds import KuhnPoker, OpenSpielEnvironment
from unit.envs.playing import play, says

pyspiel = pytest.importorskip("pyspiel")
FILES = {"filename", "word_list_file", "boards_file", "instances_file"}
GAMES = ["tic_tac_toe", "kuhn_poker", "leduc_poker", "liars_dice", "goofspiel(num_cards=4)", "kuhn_poker(players=3)"]


@pytest.mark.parametrize("game", [*GAMES, "matrix_rps", "negotiation", "connect_four"])
def test_games_keep_to_what_environments_have_to_do(game):
    check_environment(lambda: OpenSpielEnvironment(game=game), [{"seed": 1}, {"seed": 2}])


@pytest.mark.parametrize("game", GAMES)
async def test_returns_are_those_of_the_game_that_was_played(game):
    environment = OpenSpielEnvironment(game=game, actions="numbers")
    for seed in range(10):
        source = random.Random(seed)
        seen = await play(environment, {"seed": seed}, lambda observation: says(source.choice(observation.choices)))  # noqa: B023
        history = environment._state.history()
        again = pyspiel.load_game(game).new_initial_state()
        for move in history:
            again.apply_action(move) if not again.is_simultaneous_node() else None
        if again.is_terminal():
            assert {one.agent: one.reward for one in seen if one.is_last} == dict(
                zip(environment.roles, again.returns(), strict=True)
            )
        assert {one.agent: one.reward for one in seen if one.is_last} == dict(
            zip(environment.roles, environment._state.returns(), strict=True)
        )


async def test_players_at_the_same_time_are_asked_together():
    environment = OpenSpielEnvironment(game="matrix_rps")
    assert environment.zero_sum
    moves = {"player-0": "Rock", "player-1": "Paper"}
    seen = await play(environment, {}, lambda observation: says(moves[observation.agent]))
    assert [one.choices for one in seen[:2]] == [("Rock", "Paper", "Scissors")] * 2
    assert [one.reward for one in seen[2:]] == [-1.0, 1.0]


async def test_chance_comes_from_the_tasks_seed():
    async def first(seed):
        environment = OpenSpielEnvironment(game="kuhn_poker")
        await environment.reset({"seed": seed})
        shown = (await environment.observe()).content[0].text
        await environment.close()
        return shown

    cards = [await first(seed) for seed in range(30)]
    assert cards == [await first(seed) for seed in range(30)]
    assert {*cards} == {"0", "1", "2"}


async def test_kuhn_poker_of_openspiel_is_the_one_that_ships():
    """The same cards and moves: the same texts."""
    environment, ours = OpenSpielEnvironment(game="kuhn_poker"), KuhnPoker()
    left = iter(["Pass", "Bet", "Bet"])
    theirs = await play(environment, {"seed": 5}, lambda observation: says(next(left)))
    cards = [int(one.content[0].text[0]) for one in theirs[:2]]
    moves = iter("pbb")
    mine = await play(ours, {"cards": cards}, lambda observation: says(next(moves)))
    assert [one.content for one in theirs] == [one.content for one in mine]
    assert sorted(one.reward for one in theirs[-2:]) == sorted(one.reward for one in mine[-2:])


async def test_an_illegal_move_costs_the_most_that_can_be_lost():
    seen = await play(OpenSpielEnvironment(game="leduc_poker"), {}, lambda observation: says("cheat"))
    assert [one.reward for one in seen if one.is_last] == [-13.0, 13.0]


@pytest.mark.parametrize(
    ("game", "words"),
    [
        ("qqqqqqqqq", r"game.*'qqqqqqqqq'"),
        ("tic_tac_to", r"'tic_tac_to'.*'tic_tac_toe'"),
        ("goofspiel(num_cards=", r"load.*'goofspiel"),
        ("mfg_crowd_modelling", "mean-field"),
    ],
)
def test_what_can_not_be_played_is_refused(game, words):
    with pytest.raises(ConfigError, match=words):
        OpenSpielEnvironment(game=game)


def test_no_file_of_the_machine_is_read(tmp_path, capfd):
    file = tmp_path / "game.efg"
    file.write_text("secret")
    reading = f"efg_game(filename={file})"
    for game in (reading, f"misere(game={reading})", f"crossword(word_list_file={file})"):
        with pytest.raises(ConfigError, match="a file"):
            OpenSpielEnvironment(game=game)
    with pytest.raises(ConfigError, match=r"'files'.*Extra"):
        catalog_maker("open-spiel", {"game": reading, "files": True})
    assert "secret" not in "".join(capfd.readouterr())
    with pytest.raises(ConfigError, match="can't load"):  # the author of a script may let it
        OpenSpielEnvironment(game=reading, files=True)
    assert "secret" in "".join(capfd.readouterr())


def test_parameters_that_name_files_are_known():
    """Fails where a new OpenSpiel has another parameter of text, which has to be looked at."""
    texts = {
        name
        for game in pyspiel.registered_games()
        for name, value in game.parameter_specification.items()
        if isinstance(value, str)
    }
    assert {name for name in texts if "file" in name} == FILES
    assert not {name for name in texts - FILES if any(word in name for word in ("path", "dir", "url"))}
