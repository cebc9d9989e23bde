"""Output of `palestra episodes`: a run's episodes, or one of them token by token, in a folder or at a server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from palestra.dashboard.answers import CallAnswer, EpisodeDetail, ForkAnswer, MessageAnswer
from palestra.terminal import TerminalConsole, say
from palestra_inspect.episode_list import LISTED, as_json, episode_lines, newest_note, shortened

if TYPE_CHECKING:
    from palestra_inspect.folder_run import FolderRun
    from palestra_inspect.served_run import ServedRun

RunReader: TypeAlias = "FolderRun | ServedRun"
Show = Callable[[str, str], RenderableType]  # of a picture's digest, and the policy whose model got it
REPLY = 60  # characters of a reply that are shown
FOLDED = 26  # characters that stand for the tokens of a prompt


def show(run: RunReader, arguments: argparse.Namespace) -> None:
    """Print the requested list or episode."""
    console = TerminalConsole(soft_wrap=True)
    if arguments.episode is not None:
        found = run.episode(arguments.episode, whole=not arguments.json)
        if arguments.json:
            say(as_json(found))
        elif arguments.text:
            console.print(conversation(found, run.picture))
        else:
            _show(console, run, found, arguments.unfold)
        return
    if arguments.json and arguments.limit is None and not sys.stdout.isatty():
        for piece in run.every(arguments.kind, arguments.state):
            for line in piece:
                say(as_json(line))
        return
    limit = LISTED if arguments.limit is None else arguments.limit
    lines, trained = run.newest(arguments.kind, arguments.state, limit)
    if arguments.json:
        for line in lines:
            say(as_json(line))
        return
    for text in episode_lines(lines, time.time(), console.width if console.is_terminal else None, trained):
        console.print(text)
    if len(lines) == limit:
        console.print(newest_note(limit))


def conversation(found: EpisodeDetail, show: Show) -> Group:
    """Return every call with its new messages and its reply, then the rewards and the verdicts of a judge."""
    return Group(*_blocks(found.calls, show), *_rewards(found), *_verdicts(found))


def _blocks(calls: Sequence[CallAnswer], show: Show) -> Iterator[RenderableType]:
    """Yield the conversation as blocks, each on its own lines."""
    before: int | None = None
    for call in calls:
        title = f"── call {call.index}, {call.agent}, step {call.time_step}"
        if before is not None and call.parent != before:
            title += " (begins anew)" if call.parent is None else f" (begins like call {call.parent})"
        yield Text(f"{title} ──", style="dim")
        for message in call.messages:
            yield from _message(message, call.policy, show)
        if not call.messages and not call.messages_before:
            yield Text("(a prompt of token ids or raw text)", style="dim")
        elif not call.messages and call.parent is not None:
            yield Text(f"(no new message: call {call.parent} begins with this prompt, too)", style="dim")
        yield from _message(call.reply, call.policy, show, "cut at its limit" if call.finish_reason == "length" else "")
        before = call.index
    if not calls:
        yield Text("no calls", style="dim")


def _rewards(found: EpisodeDetail) -> Iterator[Text]:
    reward = found.line.reward
    yield Text("no reward" if reward is None else f"reward {reward:g}", style="bold")
    for name, value in sorted((found.named_rewards or {}).items()):
        yield Text(f"{name}: {_score(value)}", style="bold")


def _score(value: float | None) -> str:
    return "not scored" if value is None else f"{value:g}"


def _verdicts(found: EpisodeDetail) -> Iterator[Text]:
    """Yield what a job's judge has said of an episode, with its reasons."""
    for one in found.verdicts:
        because = f", because: {one.reason}" if one.reason else ""
        yield Text(f"verdict {one.verdict}: {one.name} {one.score:g}{because}")


def _message(message: MessageAnswer, policy: str, show: Show, note: str = "") -> Iterator[RenderableType]:
    """Yield the role of a message, then its texts and pictures in order."""
    name = f" {message.name}" if message.name else ""
    yield Text(f"[{message.role}{name}]{note and f' ({note})'}", style="bold cyan")
    if message.reasoning:
        yield Text(f"(thought) {message.reasoning}", style="dim")
    for part in message.content:
        text = Text(part.text + _cut(part.cut, "characters"))
        yield text if part.image is None else show(part.image, policy)
    for call in message.tool_calls:
        yield Text(f"→ {call.name}({call.arguments})", style="yellow")
    if message.tool_calls_cut:
        yield Text(f"→{_cut(message.tool_calls_cut, 'calls')}", style="yellow")


def _cut(number: int, unit: str) -> str:
    """Return the note that something is left out; empty if nothing is."""
    return f" … ({number:,} more {unit})" if number else ""


def _show(console: TerminalConsole, run: RunReader, found: EpisodeDetail, unfold: bool) -> None:
    for text in _head(found):
        console.print(text)
    console.print()
    console.print(call_tree(found), soft_wrap=False)
    kept = {call.index for call in found.calls if call.kept}
    several = bool(found.line.players) or len({row.policy for row in found.rows}) > 1
    rows = [row for row in found.rows if any(call in kept for _, _, call in row.runs)]
    for number, row in enumerate(rows, 1):
        of = f" of {row.policy}{', which is frozen' if row.frozen else ''}" if several or row.frozen else ""
        sizes = f"{of}: {row.tokens} tokens, {row.sampled} sampled"
        console.print(Text.assemble((f"\nrow {number}", "bold"), sizes))
        tokens = list(_tokens(run, found.line.episode_id, row.row, row.tokens))
        console.print(_token_table(tokens, unfold), soft_wrap=False)


def _head(found: EpisodeDetail) -> Iterator[Text]:
    """Yield an episode's reward, its task, how it went, and why it was trained or not."""
    line = found.line
    reward = "none" if line.reward is None else f"{line.reward:g}"
    yield Text.assemble((line.episode_id, "bold"), f"  {line.state}  reward {reward}  attempts {line.attempts}")
    if line.rewards is not None and len(line.rewards) > 1:
        yield Text("; ".join(f"{agent} earned {earned:g}" for agent, earned in line.rewards.items()))
    if found.named_rewards:
        yield Text("; ".join(f"{name} {_score(value)}" for name, value in sorted(found.named_rewards.items())))
    yield from _verdicts(found)
    yield Text(f"task {line.task_id}: {found.task}{_cut(found.task_cut, 'bytes')}")
    if line.players:
        yield Text("; ".join(f"{role} is played by {name}" for role, name in line.players.items()))
    if line.worker is not None:
        yield Text(f"held by {line.worker}")
    if (failed := line.reason or line.earlier_reason) is not None:
        yield Text(f"{'' if line.state == 'discarded' else 'an earlier attempt '}failed: {failed}")
    if found.metadata or found.metadata_cut:
        yield Text(f"metadata: {found.metadata}{_cut(found.metadata_cut, 'bytes')}")
    yield Text(found.why, style="dim")


def call_tree(found: EpisodeDetail) -> Tree:
    """Draw each call below the call whose prompt and completion its prompt starts with."""
    calls, sampled = found.calls, sum(call.sampled for call in found.calls)
    seen = sampled + sum(call.prompt_tokens for call in calls)
    drift = sum(call.fork is not None and call.fork.drift for call in calls)
    several = len({call.policy for call in calls}) > 1
    root = Tree(
        Text(
            f"{len(calls)} call{'s' * (len(calls) != 1)}, {found.distinct_tokens:,} distinct tokens of {seen:,} that "
            f"the model saw, {sampled:,} sampled, {drift} forked from their history"
        ),
        guide_style="dim",
    )
    branches: dict[int, Tree] = {}
    for call in calls:
        place = root if call.after is None else branches[call.after]
        branches[call.index] = place.add(_label(call, call.policy if several else ""))
    return root


def _label(call: CallAnswer, policy: str) -> Text:
    text = Text(f"call {call.index}", style="bold")
    text.append(f"  {call.agent}, step {call.time_step}{policy and f', {policy}'}", style="cyan")
    reused = f"{call.reused} reused + " if call.reused else ""
    cut = ", cut at its limit" if call.finish_reason == "length" else ""
    text.append(f"  {reused}{call.prompt_tokens - call.reused} read + {call.sampled} sampled{cut}", style="not bold")
    if not call.kept:
        text.append("  abandoned, not trained", style="not bold red")
    if call.fork is not None:
        text.append("\n" + _fork(call.fork), style="not bold yellow")
    reply = "".join(part.text for part in call.reply.content)
    said = " ".join([repr(reply)[1:-1], *(f"{used.name}(…)" for used in call.reply.tool_calls)]).strip()
    text.append("\n" + shortened(said, REPLY), style="not bold dim")
    return text


def _fork(fork: ForkAnswer) -> str:
    where = "" if fork.call is None else f" (call {fork.call}, message {fork.message}, token {fork.position})"
    return f"⑂ {fork.reason.replace('_', ' ')}{where}: {fork.text}"


class _Token(NamedTuple):
    """A token of a row; `version` is empty of one that was not sampled."""

    place: int
    number: int
    text: str
    logprob: float | None
    version: str
    trained: bool


def _tokens(run: RunReader, episode_id: str, row: int, count: int) -> Iterator[_Token]:
    """Yield the tokens of a row, read in pages."""
    start = 0
    while start < count:
        page = run.tokens(episode_id, row, start)
        for at, (number, version) in enumerate(zip(page.ids, page.versions, strict=True)):
            text = "" if page.texts is None else page.texts[at]
            name = page.version_names[version] if version >= 0 else ""
            yield _Token(start + at, number, text, page.logprobs[at], name, page.trained[at])
        start += len(page.ids)


def _token_table(tokens: Sequence[_Token], unfold: bool) -> Table:
    """Return a table with a line for each sampled token, and one for each run of other tokens unless `unfold`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "id", "text", "logprob", "loss", "version"):
        table.add_column(name, justify="left" if name in ("text", "loss") else "right", no_wrap=True)
    for sampled, group in groupby(tokens, key=lambda token: bool(token.version)):
        run = list(group)
        if not sampled and not unfold and len(run) > 1:
            text = _folded("".join(token.text for token in run))
            where = f"{run[0].place}-{run[-1].place}"
            table.add_row(where, "", Text(f"{len(run)} tokens: {text}"), "", "masked", "", style="dim")
            continue
        for token in run:
            table.add_row(
                str(token.place),
                str(token.number),
                Text(repr(token.text)[1:-1]),
                "" if token.logprob is None else f"{token.logprob:.4f}",
                "masked" if not sampled else ("trained" if token.trained else "sampled"),
                token.version,
                style=None if sampled else "dim",
            )
    return table


def _folded(text: str) -> str:
    """Return the two ends of a text, in one line."""
    shown = repr(text)[1:-1]
    return shown if len(shown) <= FOLDED else f"{shown[: FOLDED // 2 - 1]} … {shown[-(FOLDED // 2 - 2) :]}"
