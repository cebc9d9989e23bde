"""`palestra episodes`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from palestra.cli.episode_tree import call_tree
from palestra.cli.options import command, run_folder
from palestra.config import AlgorithmConfig, JobConfig
from palestra.ledger.browsing import EpisodeSummary, EpisodeView, browse, list_episodes, read_episode
from palestra.terminal import TerminalConsole
from palestra.trajectory import TokenRow, TokenTrie, calls_of_final_answers, rows_of


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "episodes",
        run,
        "list a run's episodes, or show one token by token",
        "  palestra episodes runs/addition --kind validation --limit 10\n"
        "  palestra episodes runs/addition train-000012-03",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("episode", metavar="ID", nargs="?", help="an episode's id, as the list shows it")
    parser.add_argument("--kind", choices=["train", "validation", "adhoc"], help="only these")
    parser.add_argument("--state", choices=["registered", "claimed", "completed", "discarded"], help="only these")
    parser.add_argument("--limit", type=int, default=40, help="newest so many (default 40)")


def run(arguments: argparse.Namespace) -> None:
    """Read the run store; a running job is not disturbed."""
    folder, config = run_folder(arguments.run_dir)
    console = TerminalConsole(highlight=False, soft_wrap=arguments.episode is not None)
    with browse(folder / "run.db") as connection:
        if arguments.episode is None:
            rows = list_episodes(connection, arguments.kind, arguments.state, arguments.limit)
            console.print(_list(rows))
        else:
            _show(console, read_episode(connection, arguments.episode), config.algorithm, _token_text(config))


def _list(rows: Sequence[EpisodeSummary]) -> Table | str:
    if not rows:
        return "no such episodes"
    table = Table(box=None, pad_edge=False, header_style="bold")
    forks = ["forks"] if any(row.forks for row in rows) else []
    for name in ("episode", "task", "state", "reward", "calls", "tokens", "attempts", *forks, "note"):
        right = name in ("reward", "calls", "tokens", "attempts")
        width = {"episode": 17, "task": 8, "state": 9, "note": 4}.get(name, len(name))
        justify: Literal["right", "left"] = "right" if right else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=width)
    for row in rows:
        reward = "" if row.reward is None else f"{row.reward:.3g}"
        note = row.reason or ", ".join(f"{k}={v!r}" for k, v in row.metadata.items())
        table.add_row(
            Text(row.episode_id),
            Text(row.task_id[:24]),
            row.state,
            reward,
            str(row.calls),
            str(row.completion_tokens),
            str(row.attempts),
            *([", ".join(f"{n} {reason.value.replace('_', ' ')}" for reason, n in row.forks.items())] if forks else []),
            Text(note[:60]),
        )
    return table


def _show(
    console: TerminalConsole, view: EpisodeView, algorithm: AlgorithmConfig, text_of: Callable[[int], str]
) -> None:
    trajectory, episode = view.trajectory, view.trajectory.episode
    reward = "none" if episode.reward is None else f"{episode.reward:g}"
    console.print(f"[bold]{episode.episode_id}[/]  {episode.state}  reward {reward}  attempts {episode.attempts}")
    console.print(Text(f"task {episode.task.task_id}: {episode.task.data}"))
    if episode.metadata:
        console.print(Text(f"metadata: {episode.metadata}"))
    trained, why = _fate(view)
    console.print(why, style="dim")
    trie = TokenTrie(trajectory.chats)
    kept = frozenset(trie.chats)
    if algorithm.abandoned == "exclude":
        kept = calls_of_final_answers(trie, trajectory.chats)
    console.print()
    console.print(call_tree(trajectory, trie, set(trie.chats) - kept))
    for number, row in enumerate(rows_of(trie, kept), 1):
        console.print(f"\n[bold]row {number}[/]: {len(row.ids)} tokens, {int(row.sampled.sum())} sampled")
        console.print(_tokens(row, trained, text_of))


def _fate(view: EpisodeView) -> tuple[bool, str]:
    """Whether its tokens are trained, and the reason in words."""
    kind = view.trajectory.episode.kind
    if kind != "train":
        return False, f"never trained: it is {'an ad-hoc' if kind == 'adhoc' else 'a validation'} episode"
    if view.step is None:
        return False, "not trained: it is in no batch yet"
    if len(set(view.group_rewards)) < 2:
        return False, f"in the batch of step {view.step}, not trained: all rewards of its group are equal"
    return True, f"trained in step {view.step}; rewards of its group: {', '.join(f'{r:g}' for r in view.group_rewards)}"


def _tokens(row: TokenRow, trained: bool, text_of: Callable[[int], str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "id", "text", "logprob", "loss", "version"):
        table.add_column(name, justify="left" if name in ("text", "loss") else "right")
    for place, token in enumerate(row.ids.tolist()):
        sampled = bool(row.sampled[place])
        loss = "masked" if not sampled else ("trained" if trained else "sampled")
        table.add_row(
            str(place),
            str(token),
            Text(repr(text_of(token))[1:-1]),
            f"{row.logprobs[place]:.4f}" if sampled else "",
            loss,
            ".".join(map(str, row.versions[place])) if sampled else "",
            style=None if sampled else "dim",
        )
    return table


def _token_text(config: JobConfig) -> Callable[[int], str]:
    if config.engine.kind == "scripted":
        from palestra.chat import ByteTokenizer

        plain = ByteTokenizer()
        return lambda token: plain.decode([token])
    from palestra.models.causal_lm import load_tokenizer

    tokenizer = load_tokenizer(config.policy.model)
    return lambda token: str(tokenizer.decode([token]))
