"""A list of episodes as lines of text: fitted to a terminal, or complete for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel
from rich.text import Text

from palestra.terminal import one_line
from palestra.types.progress import duration, short_number
from palestra.types.summaries import EpisodeSummary

LISTED = 40  # episodes, unless the command says how many
NOTE = 24  # columns of a terminal below which a note gets a line of its own
INDENT = "    "
TRAINED = "trained in"  # column of the step whose batch has the episode
RIGHT = ("reward", "calls", "cut", "tokens", "attempts", TRAINED)
TASK = 24  # the longest name of a task on a terminal
SHORTENED, SHORTEST = ("players", "forks", "task", "held by"), 5  # columns and their width where the terminal is narrow
AGENTS = 4  # whose rewards are listed


def episode_lines(
    rows: Sequence[EpisodeSummary],
    now: float,
    width: int | None,
    trained: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Text]:
    """Yield a header and a line for each episode. `now`: Unix seconds. Lines are fitted to `width` columns; None:
    nothing is cut or wrapped.
    """
    if not rows:
        yield Text("no such episodes")
        return
    columns = ["episode", "task", "state", "reward", "calls", "tokens", "attempts"]
    columns[5:5] = ["cut"] if any(row.cut for row in rows) else []
    columns += [TRAINED] if trained else []
    columns += ["forks"] if any(row.forks for row in rows) else []
    columns += ["players"] if any(row.players for row in rows) else []
    columns += ["held by"] if any(row.worker is not None for row in rows) else []
    cells = [
        _cells(row, now, None if width is None else TASK) | {TRAINED: str(trained.get(row.episode_id, ""))}
        for row in rows
    ]
    sizes = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in columns}
    if width is not None:
        for name in (name for name in SHORTENED if name in sizes):
            over = sum(sizes.values()) + 2 * (len(columns) - 1) - width
            sizes[name] = min(sizes[name], max(sizes[name] - over, SHORTEST))
    left = None if width is None else width - sum(sizes.values()) - 2 * len(columns)
    beside = left is None or left >= NOTE
    yield Text(_line({name: name for name in columns} | {"note": "note"}, columns, sizes, beside), style="bold")
    for cell in cells:
        note = cell["note"]
        if beside and left is not None and len(note) > left:
            cell["note"] = shortened(note, left)
        yield Text(_line(cell, columns, sizes, beside))
        if not beside and note and width is not None:
            room = max(width - 1, len(INDENT) + NOTE)
            for line in textwrap.wrap(note, room, initial_indent=INDENT, subsequent_indent=INDENT):
                yield Text(line, style="dim")


def newest_note(limit: int) -> Text:
    """Return the line below a list that may have left out older episodes."""
    return Text(f"these are the newest {limit}; --limit lists more", style="dim")


def as_json(answer: BaseModel) -> str:
    """Return an answer as JSON with terminal control characters escaped."""
    return json.dumps(json.loads(answer.model_dump_json()))


def reward_text(row: EpisodeSummary) -> str:
    """Return an episode's reward as text; for several agents each one's, because those of a game sum to 0."""
    if row.rewards is None or len(row.rewards) < 2:
        return short_number(row.reward)
    found = [f"{agent} {short_number(reward)}" for agent, reward in row.rewards.items()]
    more = [f"… ({len(found)} agents)"] if len(found) > AGENTS else []
    return one_line(", ".join([*found[:AGENTS], *more]))


def shortened(text: str, most: int) -> str:
    """Return a text, truncated to `most` characters with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _cells(row: EpisodeSummary, now: float, task: int | None) -> dict[str, str]:
    if row.damaged is not None:
        nothing = dict.fromkeys(
            ("task", "reward", "calls", "cut", "tokens", "attempts", "forks", "players", "held by"), ""
        )
        return nothing | {"episode": row.episode_id, "state": "damaged", "note": row.damaged}
    held = "" if row.worker is None else row.worker
    if row.worker is not None and row.claimed_at is not None:
        held += f" since {duration(now - row.claimed_at)}"
    notes = [row.reason or row.about]
    if row.earlier_reason is not None:
        notes.append(f"an earlier attempt failed: {row.earlier_reason}")
    return {
        "episode": row.episode_id,
        "task": row.task_id if task is None else shortened(row.task_id, task),
        "state": row.state,
        "reward": reward_text(row),
        "calls": str(row.calls),
        "cut": str(row.cut or ""),
        "tokens": str(row.tokens),
        "attempts": str(row.attempts),
        "forks": ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in row.forks.items()),
        "players": ", ".join(f"{role}={name}" for role, name in row.players.items()),
        "held by": held,
        "note": " ".join("; ".join(filter(None, notes)).split()),
    }


def _line(cell: dict[str, str], columns: Sequence[str], sizes: dict[str, int], beside: bool) -> str:
    cut = {name: shortened(value, sizes.get(name, len(value))) for name, value in cell.items()}
    parts = [cut[name].rjust(sizes[name]) if name in RIGHT else cut[name].ljust(sizes[name]) for name in columns]
    return "  ".join([*parts, cell["note"]] if beside else parts).rstrip()
