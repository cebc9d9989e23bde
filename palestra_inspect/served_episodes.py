"""Output of `palestra episodes` for a run at a server, made of the answers of its page."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import get_args

from rich.text import Text

from palestra.dashboard.answers import CallAnswer, EpisodeDetail, ForkAnswer, MessageAnswer
from palestra.errors import ConfigError
from palestra.terminal import TerminalConsole, say
from palestra.types.records import EpisodeKind
from palestra_inspect.episode_list import LISTED, as_json, episode_lines, newest_note
from palestra_inspect.served_run import ServedRun


def show_served(run: ServedRun, arguments: argparse.Namespace) -> None:
    """Print the requested list or episode."""
    if arguments.unfold:
        raise ConfigError("--unfold needs the run's folder; the page of the server shows tokens")
    if arguments.json:
        _write_json(run, arguments)
        return
    console = TerminalConsole(soft_wrap=True)
    if arguments.episode is not None:
        for text in episode_texts(run.episode(arguments.episode)):
            console.print(text)
        return
    limit = LISTED if arguments.limit is None else arguments.limit
    lines, trained = run.newest(arguments.kind, arguments.state, limit)
    for line in episode_lines(lines, time.time(), console.width if console.is_terminal else None, trained):
        console.print(line)
    if len(lines) == limit:
        console.print(newest_note(limit))


def _write_json(run: ServedRun, arguments: argparse.Namespace) -> None:
    """Write a line of JSON for each episode, or one for the requested episode with its calls."""
    if arguments.episode is not None:
        say(as_json(run.episode(arguments.episode)))
    elif arguments.limit is None and not sys.stdout.isatty():
        for kind in get_args(EpisodeKind) if arguments.kind is None else (arguments.kind,):
            for page in run.pages(kind, arguments.state):
                for line in page.episodes:
                    say(as_json(line))
    else:
        limit = LISTED if arguments.limit is None else arguments.limit
        for line in run.newest(arguments.kind, arguments.state, limit)[0]:
            say(as_json(line))


def episode_texts(found: EpisodeDetail) -> Iterator[Text]:
    """Yield an episode: its reward, its task, why it was trained or not, and its calls with their messages."""
    line = found.line
    reward = "none" if line.reward is None else f"{line.reward:g}"
    yield Text.assemble((line.episode_id, "bold"), f"  {line.state}  reward {reward}  attempts {line.attempts}")
    if line.rewards is not None and len(line.rewards) > 1:
        yield Text("; ".join(f"{agent} earned {earned:g}" for agent, earned in line.rewards.items()))
    if found.named_rewards:
        named = (f"{name} {'not scored' if n is None else f'{n:g}'}" for name, n in found.named_rewards.items())
        yield Text("; ".join(named))
    for verdict in found.verdicts:
        because = f", because: {verdict.reason}" if verdict.reason else ""
        yield Text(f"verdict: {verdict.name} {verdict.score:g}{because}")
    yield Text(f"task {line.task_id}: {found.task}{_cut(found.task_cut, 'bytes')}")
    if line.worker is not None:
        yield Text(f"held by {line.worker}")
    for failed in filter(None, (line.reason, line.earlier_reason)):
        yield Text(f"{'failed' if failed is line.reason else 'an earlier attempt failed'}: {failed}")
    if found.metadata or found.metadata_cut:
        yield Text(f"metadata: {found.metadata}{_cut(found.metadata_cut, 'bytes')}")
    yield Text(found.why, style="dim")
    for call in found.calls:
        yield from _call(call)


def _call(call: CallAnswer) -> Iterator[Text]:
    after = "" if call.after is None else f", begins like call {call.after}"
    sizes = f"{call.prompt_tokens - call.reused} read + {call.sampled} sampled, {call.seconds:.2f} s"
    yield Text(f"── call {call.index}, {call.agent}, step {call.time_step}{after}: {sizes} ──", style="dim")
    if call.fork is not None:
        yield Text(_fork(call.fork), style="yellow")
    for message in call.messages:
        yield from _message(message)
    yield from _message(call.reply, "cut at its limit" if call.finish_reason == "length" else "")


def _fork(fork: ForkAnswer) -> str:
    where = "" if fork.call is None else f" (call {fork.call}, message {fork.message}, token {fork.position})"
    return f"⑂ {fork.reason.replace('_', ' ')}{where}: {fork.text}"


def _message(message: MessageAnswer, note: str = "") -> Iterator[Text]:
    name = f" {message.name}" if message.name else ""
    yield Text(f"[{message.role}{name}]{note and f' ({note})'}", style="bold cyan")
    if message.reasoning:
        yield Text(f"(thought) {message.reasoning}", style="dim")
    for part in message.content:
        yield Text(part.text + _cut(part.cut, "characters") if part.image is None else f"[picture {part.image}]")
    for call in message.tool_calls:
        yield Text(f"→ {call.name}({call.arguments})", style="yellow")
    if message.tool_calls_cut:
        yield Text(f"→{_cut(message.tool_calls_cut, 'calls')}", style="yellow")


def _cut(number: int, unit: str) -> str:
    """Return the note that something is left out; empty if nothing is."""
    return f" … ({number:,} more {unit})" if number else ""
