"""`palestra matrix`: versions of a run, or several models, against one another, with Elo ratings and a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import ENVIRONMENT, add_command, add_set, load_environment, overrides
from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.config import JobConfig


def add_matrix(commands: Any) -> None:
    """Add the command `matrix`, which takes a run or models, and a game of two."""
    parser = add_command(
        commands,
        "matrix",
        _run,
        "let versions of a run, or several models, play each other in a game of two",
        "  palestra matrix runs/gomoku --environment gomoku-duel\n"
        "  palestra matrix runs/gomoku --add before=SmolLM2-135M-Instruct --games 100 --picture matrix.png\n"
        "  palestra matrix --add new=runs/a --add old=runs/b --environment gomoku-duel\n"
        "  palestra matrix runs/nim --environment nim.py:Nim --tasks games.jsonl\n\n"
        "exit code: 0 every game was finished, 1 some were not, 2 an error, 130 stopped",
    )
    parser.add_argument(
        "run_dir", metavar="RUN", nargs="?", type=Path, help="the run whose versions play; without it, only --add"
    )
    parser.add_argument(
        "--add",
        metavar="NAME=MODEL",
        action="append",
        default=[],
        help="one more player: a model, a checkpoint's folder, or a run's (its newest); may be given several times",
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="versions of this policy alone; without it, of every one that the run trains"
    )
    parser.add_argument(
        "--environment", metavar="NAME", help=f"{ENVIRONMENT}; without it, the run's, if that one ships"
    )
    parser.add_argument(
        "--tasks", metavar="FILE", type=Path, help="JSONL file; without it, those of an environment that ships"
    )
    parser.add_argument("--games", metavar="GAMES", type=int, default=20, help="of each pair, in each of both seatings")
    parser.add_argument("--greedy", action="store_true", help="the most probable replies; without it, sampled ones")
    parser.add_argument("--random", action="store_true", help="one more player, who draws legal moves")
    parser.add_argument("--concurrency", metavar="GAMES", type=int, default=64, help="played at the same time")
    parser.add_argument("--seed", type=int, help="of all sampling; without it, the run's")
    parser.add_argument("--picture", metavar="FILE.png", type=Path, help="draw the matrix; without it, only the table")
    parser.add_argument("--json", action="store_true", help="for programs: one object, with all games")
    add_set(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Play all games, print the matrix, and return the exit code documented in the help."""
    from palestra.runtime.scores import replayed_words
    from palestra_lab.matrix.play import legal_choices, play_matrix, versions_of
    from palestra_lab.matrix.result import draw_matrix

    players = {} if arguments.run_dir is None else versions_of(arguments.run_dir, arguments.policy)
    for given in arguments.add:
        name, equals, model = given.partition("=")
        if not (name and equals and model):
            raise ConfigError(f"--add {given}: write NAME=MODEL, as in --add old=runs/gomoku")
        if name in players:
            raise ConfigError(f"--add {given}: there is a player {name!r} already")
        players[name] = model
    config = _config(arguments)
    found = play_matrix(
        players,
        load_environment(arguments.environment),
        config,
        moves=legal_choices if arguments.random else None,
        tasks=arguments.tasks or (),
        games=arguments.games,
        greedy=arguments.greedy,
        seed=arguments.seed,
        concurrency=arguments.concurrency,
    )
    if arguments.json:
        say(json.dumps(found.as_json()))
    else:
        say(found.text())
        failed = f"; {found.failed} were not finished" if found.failed else ""
        failed += f"; {replayed_words(found.replays)}" if found.replays else ""
        say(f"\nmean reward of the row's player against the column's, in {len(found.games)} games{failed}")
    if arguments.picture is not None:
        title = "against one another" if arguments.run_dir is None else f"versions of {arguments.run_dir.name}"
        draw_matrix(found, title, arguments.picture)
    return 1 if found.failed else 0


def _config(arguments: argparse.Namespace) -> JobConfig:
    """Return the settings of the run, or the defaults, with those of the arguments."""
    from palestra.config import SAVED_CONFIG, load_config, parse_config

    settings = overrides(arguments.set)
    if arguments.run_dir is None:
        return parse_config({}, settings)
    return load_config(arguments.run_dir / SAVED_CONFIG, settings)
