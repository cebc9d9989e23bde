"""An episode with its calls, and the tokens of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from palestra.dashboard.answers import (
    CallAnswer,
    EpisodeDetail,
    ForkAnswer,
    MessageAnswer,
    PartAnswer,
    RowAnswer,
    TokensAnswer,
    ToolUse,
    VerdictAnswer,
)
from palestra.dashboard.credit import Credit, batch_group, credits_of_group, readable_manifest
from palestra.dashboard.fate import (
    OTHER_ROW,
    PROMPT,
    TokenFates,
    continued_calls,
    episode_fates,
    kept_calls,
    unused_reasons,
    whole_fate,
)
from palestra.dashboard.runs import Run
from palestra.dashboard.steps import MOST_TEXT, fitting, mean_logprob
from palestra.errors import ModelError, NotFound
from palestra.store.browsing import EpisodeView, calls_of, episode_events, read_episode, summary
from palestra.store.calls import KEPT_STEPS, TrainedCall, read_trained
from palestra.store.run_log import is_finished
from palestra.store.tables import episodes
from palestra.tokens import TokenTrie, rows_of
from palestra.types.calls import MEANINGS, Chat, SamplingParams
from palestra.types.messages import ChatMessage, ImagePart, TextPart
from palestra.types.records import TrainSample
from palestra.types.summaries import EpisodeSummary

MOST_TOKENS = 5_000  # tokens of one answer
MOST_LOG_RATIO = 80.0  # of a ratio that is shown, so that it is a number
NOT_RECORDED = f"the logprobs when it was trained are not recorded: they are kept of the newest {KEPT_STEPS} steps"


@dataclass(frozen=True, kw_only=True)
class EpisodeReading:
    """Everything that the page shows of one episode, read once for all token pages.

    Attributes:
        fates: why tokens are trained or not.
        trained: recorded logprobs at training, by call.
        settled: whether its step is finished, so that this never changes.
    """

    view: EpisodeView
    line: EpisodeSummary
    continued: Mapping[int, Chat | None]
    distinct: int
    rows: list[TrainSample]
    fates: TokenFates
    credits: Mapping[str, Credit]
    trained: Mapping[int, TrainedCall]
    settled: bool

    @property
    def notes(self) -> list[str]:
        """Return what is unknown about the tokens, and why."""
        return list(dict.fromkeys(note for credit in self.credits.values() for note in credit.notes))


def read_reading(run: Run, episode_id: str) -> EpisodeReading:
    """Read an episode and its group."""
    config = run.config
    with run.open() as connection:
        view = read_episode(connection, episode_id)
        row = connection.execute(select(episodes).where(episodes.c.episode_id == episode_id)).one()
        line = summary(row, calls_of(connection, [episode_id]).get(episode_id, []))
        events = episode_events(connection, view)
        manifest = None if view.step is None else readable_manifest(connection, view.step)
        group = batch_group(connection, manifest, view.trajectory.episode.group_index)
        settled = view.step is not None and is_finished(connection, view.step)
        credits = credits_of_group(connection, config, manifest, group)
        trained = {} if view.step is None else read_trained(connection, view.step, episode_id)
    chats = view.trajectory.chats
    trie = TokenTrie(chats)
    kept = kept_calls(view.trajectory, config)
    rows = rows_of(trie, kept)
    if left_out := set(trie.chats) - kept:
        rows += rows_of(trie, left_out)
    by_policy = episode_fates(view, config, group, events)
    fates = TokenFates(
        episode=whole_fate(by_policy),
        by_policy=by_policy,
        frozen=config.players.of_episode(view.trajectory.episode.players).frozen,
        kept=kept,
        policies={chat.index: chat.policy for chat in chats},
        unused=unused_reasons(view.trajectory, config.players),
    )
    return EpisodeReading(
        view=view,
        line=line,
        continued=continued_calls(chats, trie),
        distinct=len(trie),
        rows=rows,
        fates=fates,
        credits=credits,
        trained=trained,
        settled=settled,
    )


def episode_answer(run: Run, reading: EpisodeReading, most: int = MOST_TEXT) -> EpisodeDetail:
    """Return an episode with its calls and the outline of its rows. `most`: characters of a text, bytes of JSON."""
    view, fates = reading.view, reading.fates
    episode = view.trajectory.episode
    (task, task_cut), (metadata, metadata_cut) = fitting(episode.task.data, most), fitting(episode.metadata, most)
    return EpisodeDetail(
        run=run.name,
        line=reading.line,
        task=task,
        task_cut=task_cut,
        metadata=metadata,
        metadata_cut=metadata_cut,
        step_rewards=None if episode.step_rewards is None else list(episode.step_rewards),
        named_rewards=episode.named_rewards,
        verdicts=[
            VerdictAnswer(
                verdict=number, name=name, score=score, reason=verdict.reasons.get(episode.episode_id, {}).get(name)
            )
            for number, verdict in enumerate(view.verdicts)
            for name, score in verdict.scores.get(episode.episode_id, {}).items()
        ],
        step=view.step,
        trained=fates.episode.trained,
        why=fates.episode.why,
        distinct_tokens=reading.distinct,
        calls=[call_answer(chat, reading.continued[chat.index], fates, most) for chat in view.trajectory.chats],
        rows=[_row(number, row, fates) for number, row in enumerate(reading.rows)],
        notes=reading.notes,
    )


OF_CHAT = ("index", "agent", "policy", "time_step", "prompt_tokens", "finish_reason", "stop", "started_at")


def call_answer(chat: Chat, before: Chat | None, fates: TokenFates, most: int = MOST_TEXT) -> CallAnswer:
    """Return a call, with the earlier one that it continues. `most`: characters of a text."""
    fate, fork = fates.of_call(chat.index), chat.fork
    return CallAnswer(
        **{name: getattr(chat, name) for name in OF_CHAT},
        parent=None if chat.parent is None else chat.parent.index,
        after=None if before is None else before.index,
        reused=0 if before is None else before.tokens,
        sampled=len(chat.completion_ids),
        fork=None
        if fork is None
        else ForkAnswer(**asdict(fork), text=MEANINGS[fork.reason], drift=fork.reason.is_drift),
        kept=chat.index in fates.kept,
        trained=fate.trained,
        why=fate.why,
        versions=[(str(span.version), span.tokens) for span in chat.versions],
        mean_logprob=mean_logprob([chat]),
        temperature=chat.sampling.temperature,
        max_tokens=chat.sampling.max_tokens,
        seed=str(chat.sampling.seed),
        sampling=_further(chat.sampling),
        grammar=chat.sampling.grammar[:most],
        tools=[_tool_name(tool) for tool in chat.tools],
        seconds=chat.finished_at - chat.started_at,
        messages=[_message(message, most) for message in chat.new_messages],
        messages_before=chat.shared_messages,
        reply=_message(chat.reply, most),
    )


def _tool_name(tool: dict[str, Any]) -> str:
    """Return the name of a tool; a run of before may have recorded one of another form, and its name is then `?`."""
    function = tool.get("function", tool)
    return str(function.get("name", "?")) if isinstance(function, dict) else "?"


def _further(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from defaults and have no field of their own."""
    return {
        field.name: getattr(sampling, field.name)
        for field in fields(SamplingParams)
        if field.default is not MISSING and field.name != "grammar" and getattr(sampling, field.name) != field.default
    }


def _message(message: ChatMessage, most: int) -> MessageAnswer:
    calls = most // 100  # tool calls that are shown
    return MessageAnswer(
        role=message.role,
        name=message.name,
        content=_content(message, most),
        reasoning=None if message.reasoning_content is None else message.reasoning_content[:most],
        tool_calls=[
            ToolUse(id=call.id, name=call.function.name, arguments=call.function.arguments[:most])
            for call in message.tool_calls[:calls]
        ],
        tool_calls_cut=max(len(message.tool_calls) - calls, 0),
        tool_call_id=message.tool_call_id,
    )


def _content(message: ChatMessage, room: int) -> list[PartAnswer]:
    """Return the texts and images of a message in order; all texts together have at most `room` characters."""
    found: list[PartAnswer] = []
    for of_images, parts in groupby(message.content, lambda part: isinstance(part, ImagePart)):
        if of_images:
            found += [PartAnswer(image=part.digest) for part in parts if isinstance(part, ImagePart)]
            continue
        # Neighbouring texts are one part, so that a message of very many short texts does not stop a browser.
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        if text:
            found.append(PartAnswer(text=text[:room], cut=max(len(text) - room, 0)))
            room = max(room - len(text), 0)
    return found


def _row(number: int, row: TrainSample, fates: TokenFates) -> RowAnswer:
    edges = np.flatnonzero(np.diff(row.calls)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(row.ids)]
    runs = [(start, end, int(row.calls[start])) for start, end in zip(starts, ends, strict=True)]
    return RowAnswer(
        row=number,
        policy=row.policy,
        tokens=len(row.ids),
        sampled=int(row.loss_mask.sum()),
        runs=runs,
        trained=any(fates.of_call(call).trained for _, _, call in runs if call >= 0),
        frozen=row.policy in fates.frozen,
    )


def read_tokens(run: Run, reading: EpisodeReading, number: int, start: int, count: int) -> TokensAnswer:
    """Return tokens of a row. `count`: at most `MOST_TOKENS`."""
    if not 0 <= number < len(reading.rows):
        raise NotFound(f"the episode has {len(reading.rows)} rows; there is no row {number}")
    row = reading.rows[number]
    start = min(start, len(row.ids))
    here = slice(start, min(start + min(count, MOST_TOKENS), len(row.ids)))
    ids, calls = row.ids[here].tolist(), row.calls[here].tolist()
    notes, texts = list(reading.notes), list[str]()
    try:
        text_of = run.text_of(row.policy)
        known = {token: text_of(token) for token in set(ids)}
        texts = [known[token] for token in ids]
    except ModelError as error:
        notes.append(f"tokens have no text here: {error}")
    names = {
        tuple(version): place
        for place, version in enumerate(sorted({tuple(v) for v in row.versions[here].tolist() if v[0] >= 0}))
    }
    advantages, weights = _credit_of(reading, row, here)
    trained = _trained_of(reading, row, here)
    if reading.fates.episode.trained and not reading.trained:
        notes.append(NOT_RECORDED)
    fates = _Fates(reading, row, here)
    return TokensAnswer(
        run=run.name,
        row=number,
        start=start,
        ids=ids,
        texts=texts or None,
        calls=calls,
        logprobs=_numbers(row.logprobs[here]),
        trained_logprobs=_numbers(trained),
        ratios=_numbers(np.exp(np.minimum(trained - row.logprobs[here].astype(np.float64), MOST_LOG_RATIO))),
        advantages=_numbers(advantages),
        weights=_numbers(weights),
        versions=[names.get(tuple(version), -1) for version in row.versions[here].tolist()],
        version_names=[f"{incarnation}.{n}" for incarnation, n in names],
        temperatures=_numbers(np.where(row.loss_mask[here], row.temperatures[here], np.nan)),
        fates=fates.places,
        fate_texts=fates.texts,
        trained=fates.trained,
        notes=notes,
    )


class _Fates:
    """The reason of each token in a part of a row, as indices into a list of texts."""

    def __init__(self, reading: EpisodeReading, row: TrainSample, here: slice) -> None:
        self.texts: list[str] = []
        known: dict[tuple[int, bool], tuple[int, bool]] = {}
        elsewhere = _sampled_elsewhere(reading, row, here)
        found = []
        for call, other in zip(row.calls[here].tolist(), elsewhere, strict=True):
            if (call, other) not in known:
                fate = reading.fates.of_call(call) if call >= 0 else None
                known[call, other] = len(self.texts), fate is not None and fate.trained
                self.texts.append((OTHER_ROW if other else PROMPT) if fate is None else fate.why)
            found.append(known[call, other])
        self.places = [place for place, _ in found]
        self.trained = [trained for _, trained in found]


def _sampled_elsewhere(reading: EpisodeReading, row: TrainSample, here: slice) -> list[bool]:
    """Return for each token whether it is in a prompt here, but sampled in another row of the policy."""
    found = np.zeros(len(row.ids), np.bool_)
    for other in reading.rows:
        if other is row or other.policy != row.policy:
            continue
        length = min(len(row.ids), len(other.ids))
        differ = np.flatnonzero(row.ids[:length] != other.ids[:length])
        common = int(differ[0]) if len(differ) else length
        found[:common] |= other.loss_mask[:common]
    return [bool(one) for one in (found & ~row.loss_mask)[here]]


def _credit_of(reading: EpisodeReading, row: TrainSample, here: slice) -> tuple[Any, Any]:
    """Return advantages and loss weights of a row's tokens, NaN where missing or unknown."""
    count = here.stop - here.start
    advantages, weights = np.full(count, np.nan, np.float32), np.full(count, np.nan, np.float64)
    credit = reading.credits.get(row.policy)
    if credit is None:
        return advantages, weights
    name = reading.view.trajectory.episode.episode_id
    by_call, weight = credit.advantages.get(name, {}), credit.weights.get(name)
    prompts = {chat.index: chat.prompt_tokens for chat in reading.view.trajectory.chats}
    calls = row.calls[here]
    for call in set(calls.tolist()) - {-1}:
        places = np.flatnonzero(calls == call)
        if (values := by_call.get(call)) is None:
            continue
        advantages[places] = values[places + here.start - prompts[call]]
        if weight is not None:
            weights[places] = np.where(np.isnan(advantages[places]), np.nan, weight)
    return advantages, weights


def _trained_of(reading: EpisodeReading, row: TrainSample, here: slice) -> NDArray[np.float64]:
    """Return the logprobs of tokens of a row when they were trained, NaN where they were not, or are not recorded."""
    found = np.full(len(row.ids), np.nan, np.float64)
    for index in set(row.calls[here].tolist()) - {-1}:
        call = reading.trained.get(index)
        if call is None:
            continue
        values = call.logprobs[: max(len(row.ids) - call.start, 0)]
        own = row.calls[call.start : call.start + len(values)] == index
        found[call.start : call.start + len(values)][own] = values[own]
    return found[here]


def _numbers(values: Any) -> list[float | None]:
    """Return numbers for JSON, which has no NaN; infinities become the largest float32."""
    plain = np.nan_to_num(np.asarray(values, np.float64), nan=np.nan, posinf=3e38, neginf=-3e38)
    return [None if value != value else float(f"{value:.7g}") for value in plain.tolist()]  # float32 has 7 digits
