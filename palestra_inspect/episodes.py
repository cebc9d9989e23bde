"""`palestra episodes`: the episodes of a run in a folder or at a server, and which of their tokens were trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import WATCHED, add_command, add_control, is_served, run_folder


def add_episodes(commands: Any) -> None:
    """Add the command `episodes`, which lists a run's episodes or shows one."""
    parser = add_command(
        commands,
        "episodes",
        _run,
        "list a run's episodes, or show one token by token",
        "  palestra episodes runs/addition --kind validation --limit 10\n"
        "  palestra episodes runs/addition --claimed            # who holds what, and since when\n"
        "  palestra episodes runs/addition train-000012-03\n"
        "  palestra episodes runs/addition train-000012-03 --text   # the conversation, as it was\n"
        "  palestra episodes runs/addition --kind train --json > episodes.jsonl\n"
        "  palestra episodes http://server:7411                 # of a run at a server, with its key",
    )
    parser.add_argument("source", metavar="RUN", help=WATCHED)
    parser.add_argument(
        "episode", metavar="ID", nargs="?", help="an episode's id, as the list shows it; without it, the list"
    )
    parser.add_argument("--kind", choices=["train", "validation", "adhoc"], help="list only this kind; without it, all")
    parser.add_argument(
        "--state",
        metavar="STATE",
        choices=["registered", "claimed", "unjudged", "completed", "discarded"],
        help="list only those that are registered, claimed, unjudged, completed or discarded; without it, all",
    )
    parser.add_argument(
        "--claimed", dest="state", action="store_const", const="claimed", help="list only those that a worker holds now"
    )
    parser.add_argument(
        "--limit",
        metavar="EPISODES",
        type=int,
        help="list at most so many, the newest; without it 40, or all with --json into a file or a pipe",
    )
    parser.add_argument("--text", action="store_true", help="of one episode: its conversation as plain text")
    parser.add_argument(
        "--json", action="store_true", help="for programs: a JSON object for each episode, or the one with its calls"
    )
    parser.add_argument(
        "--unfold", action="store_true", help="of one episode: every token of the prompts, in a line of its own"
    )
    add_control(parser)


def _run(arguments: argparse.Namespace) -> None:
    """Read the run and print the requested part, without disturbing a running job."""
    from palestra_inspect.episode_view import show

    if is_served(arguments.source):
        from palestra_inspect.served_run import served_run

        with served_run(arguments.source, arguments.control) as run:
            show(run, arguments)
        return
    from palestra_inspect.folder_run import FolderRun  # reads a run store, which the client alone can't

    folder, _ = run_folder(Path(arguments.source))
    show(FolderRun.at(folder), arguments)
