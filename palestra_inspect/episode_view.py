"""Output of `palestra episodes`: a run's episodes, or one of them token by token."""

from __future__ import annotations

import argparse
import base64
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from sqlalchemy import Connection

from palestra.config import JobConfig
from palestra.dashboard.fate import continued_calls
from palestra.dashboard.runs import token_text
from palestra.errors import NotFound, PalestraError
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.pictures.containers import OF_A_RUN
from palestra.pictures.pixels import decode_picture, encode_picture
from palestra.renderers.picture_layout import PictureLayout, apart, layout_fact, read_layout
from palestra.store.browsing import (
    EpisodeView,
    browse,
    episode_events,
    newest_rows,
    pieces_of_rows,
    read_episode,
    trained_steps,
)
from palestra.store.run_log import read_fact
from palestra.store.search import readable_summaries
from palestra.terminal import TerminalConsole, say
from palestra.tokens import TokenTrie, rows_of
from palestra.types.calls import MEANINGS, Chat, Fork
from palestra.types.messages import ChatMessage, ImagePart
from palestra.types.records import TrainSample, Trajectory, Verdict
from palestra.types.states import EpisodeState
from palestra_inspect.episode_list import LISTED, as_json, episode_lines, newest_note, shortened

if TYPE_CHECKING:
    from PIL.Image import Image


Protocol = Literal["kitty", "iterm"]
_CHUNK = 4096  # characters of base64 in one of kitty's commands


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """Return the terminal's picture protocol, from environment variables, or None.

    tmux and screen only pass pictures on if configured to, so there is none inside them.
    """
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux")):
        return None
    if "kitty" in term or "KITTY_WINDOW_ID" in environment or program == "ghostty":
        return "kitty"
    if program in {"iTerm.app", "WezTerm"} or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    return None


@dataclass(frozen=True)
class TerminalPicture:
    """A run's picture as a line with a link to its file, and the picture below if the terminal supports it.

    It has exactly the pixels that the model got, with gaps between tiles or embedding squares, if the run has recorded
    the model's image settings; otherwise it is the decoded picture.
    """

    pictures: Blobs
    digest: str
    protocol: Protocol | None
    layout: PictureLayout | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the line, and the picture as a control segment, which is omitted for files and pipes."""
        try:
            image = decode_picture(self.pictures.get(self.digest), OF_A_RUN)
            shown, got = self._shown(image)
        except NotFound:
            yield Text(f"[picture {self.digest}, whose file is gone]", style="red")
            return
        except PalestraError as error:
            yield Text(f"[picture {self.digest}: {error}]", style="red")
            return
        path = self.pictures.path(self.digest).absolute()
        link = Style(link=path.as_uri(), underline=True)
        yield Text(f"[picture {image.width} × {image.height}{got}: {path}]", style=link)
        if self.protocol is not None and console.is_terminal:
            commands = "".join(_commands(self.protocol, encode_picture(shown)))
            yield Segment(f"{commands}\n", None, Control((ControlType.CARRIAGE_RETURN,)).segment.control)

    def _shown(self, image: Image) -> tuple[Image, str]:
        """Return the pixels to show, and a description of how the model got them."""
        if (layout := self.layout) is None:
            return image, ""
        return apart(layout.seen(image), layout.cells(*image.size)), f", {layout.in_words(*image.size)}"


def _commands(protocol: Protocol, png: bytes) -> Iterator[str]:
    """Yield escape sequences that show a picture at the cursor."""
    encoded = base64.b64encode(png).decode()
    if protocol == "iterm":
        yield f"\x1b]1337;File=inline=1;size={len(png)}:{encoded}\x07"
        return
    pieces = [encoded[start : start + _CHUNK] for start in range(0, len(encoded), _CHUNK)]
    for number, piece in enumerate(pieces):
        head = "a=T,f=100," if number == 0 else ""
        yield f"\x1b_G{head}m={int(number < len(pieces) - 1)};{piece}\x1b\\"


Show = Callable[[str, str], RenderableType]  # of a picture's digest, and the policy whose model got it


def conversation(trajectory: Trajectory, show: Show, verdicts: Iterable[Verdict] = ()) -> Group:
    """Return every call with its new messages and its reply, then the verdicts of a judge."""
    said = _verdict_lines(verdicts, trajectory.episode.episode_id)
    return Group(*_blocks(trajectory, show), *(Text(line) for line in said))


def _verdict_lines(verdicts: Iterable[Verdict], episode_id: str) -> Iterator[str]:
    """Yield what a job's judge has said of an episode, with its reasons."""
    for number, verdict in enumerate(verdicts):
        for name, score in verdict.scores.get(episode_id, {}).items():
            reason = verdict.reasons.get(episode_id, {}).get(name)
            yield f"verdict {number}: {name} {score:g}{f', because: {reason}' if reason else ''}"


def _blocks(trajectory: Trajectory, show: Show) -> Iterator[RenderableType]:
    """Yield the conversation as blocks, each on its own lines."""
    before: Chat | None = None
    for chat in trajectory.chats:
        title = f"── call {chat.index}, {chat.agent}, step {chat.time_step}"
        if before is not None and chat.parent is not before:
            title += " (begins anew)" if chat.parent is None else f" (begins like call {chat.parent.index})"
        yield Text(f"{title} ──", style="dim")
        for message in chat.new_messages:
            yield from _message(message, chat.policy, show)
        if chat.is_raw:
            yield Text("(a prompt of token ids or raw text)", style="dim")
        elif not chat.new_messages and chat.parent is not None:
            yield Text(f"(no new message: call {chat.parent.index} begins with this prompt, too)", style="dim")
        yield from _message(chat.reply, chat.policy, show, "cut at its limit" if chat.finish_reason == "length" else "")
        before = chat
    if not trajectory.chats:
        yield Text("no calls", style="dim")
    rewards = trajectory.episode.rewards
    yield Text("no reward" if rewards is None else f"reward {trajectory.episode.reward:g}", style="bold")
    for name, value in sorted((trajectory.episode.named_rewards or {}).items()):
        yield Text(f"{name}: {'not scored' if value is None else f'{value:g}'}", style="bold")


def _message(message: ChatMessage, policy: str, show: Show, note: str = "") -> Iterator[RenderableType]:
    """Yield the role of a message, then its texts and pictures in order."""
    name = f" {message.name}" if message.name else ""
    yield Text(f"[{message.role}{name}]{f' ({note})' if note else ''}", style="bold cyan")
    if message.reasoning_content:
        yield Text(f"(thought) {message.reasoning_content}", style="dim")
    text = ""
    for part in message.content:
        if not isinstance(part, ImagePart):
            text += part.text
            continue
        if text:
            yield Text(text)
        yield show(part.digest, policy)
        text = ""
    if text:
        yield Text(text)
    for call in message.tool_calls:
        yield Text(f"→ {call.function.name}({call.function.arguments})", style="yellow")


_REPLY = 60  # characters of a reply that are shown


def call_tree(trajectory: Trajectory, trie: TokenTrie, left_out: Collection[int] = ()) -> Tree:
    """Draw each call below the call whose prompt and completion its prompt starts with. `left_out`: indices of
    abandoned calls, which are not trained on.
    """
    chats = trajectory.chats
    root = Tree(Text(_totals(chats, trie)), guide_style="dim")
    branches: dict[int, Tree] = {}
    several = len({chat.policy for chat in chats}) > 1
    continued = continued_calls(chats, trie)
    for chat in chats:
        before = continued[chat.index]
        place = root if before is None else branches[before.index]
        branches[chat.index] = place.add(_label(chat, before, chat.index in left_out, chat.policy if several else ""))
    return root


def _totals(chats: Collection[Chat], trie: TokenTrie) -> str:
    sampled = sum(len(chat.completion_ids) for chat in chats)
    seen = sum(chat.tokens for chat in chats)
    drift = sum(chat.fork is not None and chat.fork.reason.is_drift for chat in chats)
    return (
        f"{len(chats)} call{'s' * (len(chats) != 1)}, {len(trie):,} distinct tokens of {seen:,} that the model saw, "
        f"{sampled:,} sampled, {drift} forked from their history"
    )


def _label(chat: Chat, before: Chat | None, abandoned: bool, policy: str) -> Text:
    text = Text(f"call {chat.index}", style="bold")
    text.append(f"  {chat.agent}, step {chat.time_step}{policy and f', {policy}'}", style="cyan")
    text.append(_sizes(chat, before), style="not bold")
    if abandoned:
        text.append("  abandoned, not trained", style="not bold red")
    if chat.fork is not None:
        text.append("\n" + _fork(chat.fork), style="not bold yellow")
    said = " ".join([repr(chat.reply.text)[1:-1], *(f"{c.function.name}(…)" for c in chat.reply.tool_calls)]).strip()
    text.append("\n" + shortened(said, _REPLY), style="not bold dim")
    return text


def _sizes(chat: Chat, before: Chat | None) -> str:
    kept = 0 if before is None else before.tokens
    reused = f"{kept} reused + " if kept else ""
    cut = ", cut at its limit" if chat.finish_reason == "length" else ""
    return f"  {reused}{chat.prompt_tokens - kept} read + {len(chat.completion_ids)} sampled{cut}"


def _fork(fork: Fork) -> str:
    where = "" if fork.call is None else f" (call {fork.call}, message {fork.message}, token {fork.position})"
    return f"⑂ {fork.reason.value.replace('_', ' ')}{where}: {MEANINGS[fork.reason]}"


FOLDED = 26  # characters that stand for the tokens of a prompt


def show(folder: Path, config: JobConfig, arguments: argparse.Namespace) -> None:
    """Print the requested list or episode."""
    if arguments.json:
        _write_json(folder, arguments)
        return
    console = TerminalConsole(soft_wrap=True)
    with browse(folder / "run.db") as connection:
        if arguments.episode is None:
            limit = LISTED if arguments.limit is None else arguments.limit
            rows = newest_rows(connection, arguments.kind, arguments.state, limit)
            found = readable_summaries(connection, rows)
            trained = trained_steps(connection, rows)
            width = console.width if console.is_terminal else None
            for line in episode_lines(found, time.time(), width, trained):
                console.print(line)
            if len(rows) == limit:
                console.print(newest_note(limit))
            return
        view = read_episode(connection, arguments.episode)
        if arguments.text:
            pictures, protocol = Blobs(folder / FOLDER), protocol_of(os.environ)
            noted = {chat.policy: read_fact(connection, layout_fact(chat.policy)) for chat in view.trajectory.chats}
            layouts = {policy: None if fact is None else read_layout(fact) for policy, fact in noted.items()}
            console.print(
                conversation(
                    view.trajectory,
                    lambda digest, policy: TerminalPicture(pictures, digest, protocol, layouts[policy]),
                    view.verdicts,
                )
            )
        else:
            _show(console, view, connection, config, arguments.unfold)


def _write_json(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the JSON of the page's routes: a line per episode, or one for the requested episode."""
    from palestra.dashboard.episode import episode_answer, read_reading  # loads the learner, which takes a second
    from palestra.dashboard.runs import Run

    if arguments.episode is not None:
        run = Run(name=folder.name, folder=folder)
        say(as_json(episode_answer(run, read_reading(run, arguments.episode))))
        return
    limit = LISTED if arguments.limit is None and sys.stdout.isatty() else arguments.limit
    with browse(folder / "run.db") as connection:
        if limit is None:
            pieces = pieces_of_rows(connection, arguments.kind, arguments.state)
        else:
            pieces = iter([newest_rows(connection, arguments.kind, arguments.state, limit)])
        for rows in pieces:
            for one in readable_summaries(connection, rows):
                say(as_json(one))


def _show(console: TerminalConsole, view: EpisodeView, connection: Connection, config: JobConfig, unfold: bool) -> None:
    from palestra.dashboard.credit import batch_group, readable_manifest  # loads the learner, which takes a second
    from palestra.dashboard.fate import episode_fates, kept_calls, whole_fate

    trajectory, episode = view.trajectory, view.trajectory.episode
    reward = "none" if episode.reward is None else f"{episode.reward:g}"
    how = f"  {episode.state}  reward {reward}  attempts {episode.attempts}"
    console.print(Text.assemble((episode.episode_id, "bold"), how))
    if episode.rewards is not None and len(episode.rewards) > 1:
        console.print(Text("; ".join(f"{agent} earned {reward:g}" for agent, reward in episode.rewards.items())))
    if episode.named_rewards:
        named = (
            f"{name} {'not scored' if n is None else f'{n:g}'}" for name, n in sorted(episode.named_rewards.items())
        )
        console.print(Text("; ".join(named)))
    for line in _verdict_lines(view.verdicts, episode.episode_id):
        console.print(Text(line))
    console.print(Text(f"task {episode.task.task_id}: {episode.task.data}"))
    if episode.players:
        console.print(Text("; ".join(f"{role} is played by {name}" for role, name in episode.players.items())))
    if episode.state is EpisodeState.CLAIMED:
        console.print(Text(f"held by {episode.worker_id}"))
    if view.failed_reason is not None:
        which = "" if episode.state is EpisodeState.DISCARDED else "an earlier attempt "
        console.print(Text(f"{which}failed: {view.failed_reason}"))
    if episode.metadata:
        console.print(Text(f"metadata: {episode.metadata}"))
    manifest = None if view.step is None else readable_manifest(connection, view.step)
    group = batch_group(connection, manifest, episode.group_index)
    fates = episode_fates(view, config, group, episode_events(connection, view))
    console.print(whole_fate(fates).why, style="dim")
    trie = TokenTrie(trajectory.chats)
    kept = kept_calls(trajectory, config)
    console.print()
    console.print(call_tree(trajectory, trie, set(trie.chats) - kept), soft_wrap=False)
    for number, row in enumerate(rows_of(trie, kept), 1):
        frozen, of = row.policy in config.players.of_episode(episode.players).frozen, ""
        if len(config.policies) > 1 or config.players.pools:
            of = f" of {row.policy}{', which is frozen' if frozen else ''}"
        sampled = f"{of}: {len(row.ids)} tokens, {int(row.loss_mask.sum())} sampled"
        console.print(Text.assemble((f"\nrow {number}", "bold"), sampled))
        trained = row.policy in fates and fates[row.policy].trained
        console.print(_tokens(row, trained, token_text(config, row.policy), unfold), soft_wrap=False)


def _tokens(row: TrainSample, trained: bool, text_of: Callable[[int], str], unfold: bool) -> Table:
    """Return a table with a line for each sampled token, and one for each run of other tokens unless `unfold`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "id", "text", "logprob", "loss", "version"):
        table.add_column(name, justify="left" if name in ("text", "loss") else "right", no_wrap=True)
    ids = row.ids.tolist()
    for sampled, run in groupby(range(len(ids)), key=lambda place: bool(row.loss_mask[place])):
        places = list(run)
        if not sampled and not unfold and len(places) > 1:
            text = _shortened("".join(text_of(ids[place]) for place in places))
            where = f"{places[0]}-{places[-1]}"
            table.add_row(where, "", Text(f"{len(places)} tokens: {text}"), "", "masked", "", style="dim")
            continue
        for place in places:
            table.add_row(
                str(place),
                str(ids[place]),
                Text(repr(text_of(ids[place]))[1:-1]),
                f"{row.logprobs[place]:.4f}" if sampled else "",
                "masked" if not sampled else ("trained" if trained else "sampled"),
                ".".join(map(str, row.versions[place])) if sampled else "",
                style=None if sampled else "dim",
            )
    return table


def _shortened(text: str) -> str:
    """Return the two ends of a text, in one line."""
    shown = repr(text)[1:-1]
    return shown if len(shown) <= FOLDED else f"{shown[: FOLDED // 2 - 1]} … {shown[-(FOLDED // 2 - 2) :]}"
