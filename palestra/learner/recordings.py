"""Enters recorded episodes into the run store, completed, when their step is gathered.

From then on they are like played ones: manifest, rows, and resuming after a kill.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, overload

import msgspec
import numpy as np
import orjson
from jinja2 import TemplateError

from palestra.algorithms.base import Algorithm, RecordedEpisodes
from palestra.config import SAVED_CONFIG, JobConfig, Roles, load_config
from palestra.database import to_json
from palestra.errors import ConfigError
from palestra.learner.groups import Gathered, TasksOf
from palestra.learner.open_run import OpenRun
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.renderers import shown_reply
from palestra.renderers.long_text import TooManyTokens
from palestra.session import PolicyRuntime
from palestra.store import RunStore
from palestra.store.browsing import browse, called_by, list_episodes
from palestra.store.calls import read_trajectory
from palestra.threads import in_thread
from palestra.tokens import common_tokens
from palestra.types.calls import Chat, Ids, PolicyVersion, SamplingParams, TokenSequence, VersionSpan
from palestra.types.conversations import Conversation, read_conversations
from palestra.types.messages import ChatMessage, TextPart, text_message
from palestra.types.records import RecordedEpisode, Task
from palestra.types.summaries import EpisodeSummary


def learned_policies(run_dir: Path, learner: str) -> tuple[str, ...]:
    """Return the policies of a run whose calls and rewards are learned from: the one that is named like the learning
    policy, or the only one that the run has trained.
    """
    trained = source_config(run_dir).trained_policies
    if learner in trained:
        return (learner,)
    if len(trained) == 1:
        return trained
    raise ConfigError(
        f"algorithm.from_run: the run in {run_dir} has trained {' and '.join(map(repr, trained))}, and {learner!r} "
        "learns from the calls and rewards of one: give the policy that learns the name of that one"
    )


def source_config(run_dir: Path) -> JobConfig:
    """Return the configuration of a run."""
    _check_run(run_dir)
    return load_config(run_dir / SAVED_CONFIG)


def check_tokens(config: JobConfig, policies: Sequence[str], run_dir: Path, runtime: PolicyRuntime) -> None:
    """Raise ConfigError for a run whose tokens are not the learning policy's. `policies` are those of the run, to learn
    from.
    """
    for model in {config.policies[name].model for name in policies} - {runtime.config.model}:
        if config.engine.has_model and not _same_tokens(model, runtime):
            raise ConfigError(
                f"algorithm.from_run: the run in {run_dir} is of {model!r}, whose tokenizer is another one than that "
                f"of {runtime.config.model!r}, so its ids are other texts; take its messages as tasks"
            )


def is_apart(roles: Roles, policies: Sequence[str]) -> bool:
    """Return whether only one of several trained policies is learned from."""
    return bool(roles.rivals) and len(policies) == 1


def recorded_rewards(
    roles: Roles, policies: Sequence[str], players: Mapping[str, str], rewards: Mapping[str, float]
) -> dict[str, float]:
    """Return the rewards of a recorded episode that belong to the learned calls. `policies` are those of the run, to
    learn from; `players` are of roles with a pool in the episode; `rewards` are by agent.
    """
    if not is_apart(roles, policies):
        return dict(rewards)
    return dict(roles.of_episode(players).rewards_of(policies[0], rewards))


def _check_run(run_dir: Path) -> None:
    if not (run_dir / "run.db").is_file():
        raise ConfigError(f"algorithm.from_run: {run_dir} is not the folder of a run (it has no run.db)")


def _same_tokens(model: str, runtime: PolicyRuntime) -> bool:
    """Return whether every token of a model is the same bytes in the policy's tokenizer."""
    from palestra.models.causal_lm import load_tokenizer
    from palestra.renderers.vocabulary import Vocabulary

    other, own = Vocabulary(load_tokenizer(model)), runtime.renderer.vocabulary
    return len(other) == len(own) and all(other.bytes_of(token) == own.bytes_of(token) for token in range(len(own)))


def chosen_episodes(source: RecordedEpisodes, run_dir: Path, policies: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ids of a run's completed training episodes to learn from, by group of the job, in canonical order. One
    of several trained policies must have called in each episode, and its own reward counts.
    """
    roles = source_config(run_dir).players
    with browse(run_dir / "run.db") as connection:
        found = [each for each in list_episodes(connection, "train", "completed", sys.maxsize) if each.tokens]
        called = called_by(connection, policies[0]) if is_apart(roles, policies) else None
    rewarded = [
        (each, sum(recorded_rewards(roles, policies, each.players, each.rewards).values()))
        for each in found
        if each.rewards is not None and (called is None or each.episode_id in called)
    ]
    if source.pairs:
        groups = groupby(rewarded, key=lambda pair: pair[0].group_index)
        pairs = [pair for _, members in groups for pair in _best_and_worst(list(members))]
        if not pairs:
            raise ConfigError(f"algorithm.from_run: the run in {run_dir} has no group of episodes with unequal rewards")
        return pairs
    least = source.min_reward
    names: list[tuple[str, ...]] = [(each.episode_id,) for each, reward in rewarded if least is None or reward >= least]
    if not names:
        best = max((reward for _, reward in rewarded), default=None)
        most = "it has none at all" if best is None else f"the largest reward is {best:g}"
        raise ConfigError(
            f"algorithm.from_run: the run in {run_dir} has no training episode with a reward of at least {least}; "
            f"{most}"
        )
    return names


def _best_and_worst(members: Sequence[tuple[EpisodeSummary, float]]) -> list[tuple[str, ...]]:
    """Return the ids of a group's episodes with the largest and the smallest reward; none where all are equal."""
    best, worst = max(members, key=itemgetter(1)), min(members, key=itemgetter(1))
    return [(best[0].episode_id, worst[0].episode_id)] if best[1] > worst[1] else []


_IDS = "recorded_episodes"  # fact in the run store: the ids of the episodes that are learned from, by group
_POLICIES = "recorded_policies"  # fact in the run store: the policies of that run whose calls are learned
_LONGEST_FRAME, _FRAME_OF_MESSAGE = 1024, 32  # tokens that a template writes, at most: once, and for each message
_CERTAIN = 0.0  # the log-probability of a token that was given and not sampled


class Recordings:
    """The recorded episodes that a job trains on."""

    def __init__(self, source: RecordedEpisodes, runtime: PolicyRuntime, run: OpenRun) -> None:
        self._source, self._runtime, self._run, self._store = source, runtime, run, run.store
        self._policies: tuple[str, ...] = ()  # whose calls are learned, by their names in the run of the source
        self._roles = Roles(default=runtime.name)  # who plays which agent there

    @classmethod
    def of(cls, run: OpenRun, algorithms: Mapping[str, Algorithm]) -> Self | None:
        """Return what a job trains on instead of played episodes; None: they are played."""
        trained = run.policies.trained
        sources = [(name, source) for name in trained if (source := algorithms[name].recorded) is not None]
        if not sources:
            return None
        (policy, source), *_ = sources
        if len(trained) > 1:
            raise ConfigError(
                f"the algorithm of policy {policy!r} trains recorded episodes, which do not say which of "
                f"{' and '.join(map(repr, trained))} has played what; train one policy a job with it"
            )
        return cls(source, run.policies.runtime(policy), run)

    async def tasks(self) -> Sequence[Task]:
        """Return a task for each group, in canonical order; a resumed job has those of its first start."""
        run_dir = self._source.run_dir
        if run_dir is None:
            return await self._fitting(await self._store.tasks.stored("train"))
        config = await in_thread(lambda: source_config(run_dir))
        self._roles = config.players
        known = await self._store.log.fact(_IDS)
        if known is None:
            self._policies = learned_policies(run_dir, self._runtime.name)
            await in_thread(lambda: check_tokens(config, self._policies, run_dir, self._runtime))
            names = await in_thread(lambda: chosen_episodes(self._source, run_dir, self._policies))
            await self._store.log.set_fact(
                _POLICIES, to_json(list(self._policies))
            )  # before _IDS, which says it is there
            await self._store.log.set_fact(_IDS, to_json(names))
        else:
            names = orjson.loads(known)
            chosen = await self._store.log.fact(_POLICIES)
            assert chosen is not None
            self._policies = tuple(orjson.loads(chosen))
            await in_thread(lambda: check_tokens(config, self._policies, run_dir, self._runtime))
        return [Task(task_id=group[0], data={"recorded": group}) for group in names]

    async def _fitting(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Return the tasks that fit `max_context`; raise ConfigError: one is no conversation, or none fits."""
        most = self._runtime.config.max_context

        def measure() -> list[int]:
            return [position for position, task in enumerate(tasks) if self._fits(task)]

        fitting = await in_thread(measure)
        if (missing := len(tasks) - len(fitting)) == 0:
            return tasks
        text = f"{missing:,} of {len(tasks):,} tasks have more than {most:,} tokens (max_context)"
        if not fitting:
            raise ConfigError(f"{text}; nothing is left to learn from")
        await self._run.event("tasks_left_out", {"tasks": missing, "text": f"{text} and are left out"})
        return _Chosen(tasks, fitting)

    def _fits(self, task: Task) -> bool:
        given = read_conversations(task, pairs=self._source.pairs)
        if all(_most_tokens(one) <= self._runtime.config.max_context for one in given):
            return True
        try:
            for one in given:
                self._of_conversation(task, one, PolicyVersion(0, 0))
        except _TooLong:
            return False
        return True

    async def episodes(self, task: Task, version: PolicyVersion) -> tuple[RecordedEpisode, ...]:
        """Return the recorded episodes of a task, with calls as if the job's policy had made them now. All tokens get
        `version`: recorded tokens are never stale.
        """
        run_dir = self._source.run_dir
        if run_dir is None:
            return await in_thread(
                lambda: tuple(
                    self._of_conversation(task, conversation, version)
                    for conversation in read_conversations(task, pairs=self._source.pairs)
                )
            )
        return await in_thread(lambda: tuple(self._of_run(run_dir, name, version) for name in task.data["recorded"]))

    def _of_run(self, run_dir: Path, name: str, version: PolicyVersion) -> RecordedEpisode:
        """Read an episode of another run; calls of policies that are not learned from are left out."""
        with browse(run_dir / "run.db") as connection:
            found = read_trajectory(connection, name)
        episode = found.episode
        calls = [chat for chat in found.chats if chat.policy in self._policies]
        apart = is_apart(self._roles, self._policies)
        pictures = Blobs(run_dir / FOLDER)
        for digest in {span.digest for chat in calls for span in chat.all_media}:
            if not self._store.pictures.renew(digest):
                self._store.pictures.put(pictures.get(digest))
        return RecordedEpisode(
            task=Task(task_id=episode.task.task_id, data=episode.task.data),
            rewards=recorded_rewards(self._roles, self._policies, episode.players, episode.rewards or {}),
            step_rewards=None if apart else episode.step_rewards,  # those of all policies together
            step_times=episode.step_times,
            named_rewards=episode.named_rewards,
            metadata={"recorded": f"{run_dir}/{episode.episode_id}"},
            calls=tuple(self._as_own(chat, version) for chat in calls),
        )

    def _as_own(self, chat: Chat, version: PolicyVersion) -> Chat:
        """Return a call as one of the job's own policy, of this version."""
        spans = (VersionSpan(version, len(chat.completion_ids)),)
        return replace(chat, fence=0, policy=self._runtime.name, versions=spans)

    def _of_conversation(self, task: Task, given: Conversation, version: PolicyVersion) -> RecordedEpisode:
        """Return an episode with a call for each learned reply of a conversation."""
        messages = given.messages
        calls: list[Chat] = []
        for place, message in enumerate(messages):
            if message.role == "assistant" and place >= given.prompt:
                calls.append(self._call(task, messages[:place], message, given.tools, calls, version))
        return RecordedEpisode(task=task, rewards={"agent": given.reward}, metadata={}, calls=tuple(calls))

    def _call(
        self,
        task: Task,
        before: tuple[ChatMessage, ...],
        reply: ChatMessage,
        tools: tuple[dict[str, Any], ...],
        calls: Sequence[Chat],
        version: PolicyVersion,
    ) -> Chat:
        """Return the record of a reply that was given and not sampled."""
        last, room = calls[-1] if calls else None, self._runtime.config.max_context
        said = 0 if last is None else last.shared_messages + len(last.new_messages) + 1
        try:
            shared, tail, completion = self._tokens(task, before, said, reply, tools, last)
        except (ValueError, KeyError, TemplateError) as error:
            raise ConfigError(f"task {task.task_id!r}: the model's template can't show it: {error}") from error
        except TooManyTokens:
            raise _TooLong(f"task {task.task_id!r} has more tokens than max_context, which is {room:,}") from None
        if (length := shared + len(tail) + len(completion)) > room:
            raise _TooLong(f"task {task.task_id!r} has {length:,} tokens, and max_context is {room:,}")
        parent = last if shared else None
        return Chat(
            episode_id="",
            fence=0,
            index=len(calls),
            time_step=len(calls),
            agent="agent",
            policy=self._runtime.name,
            parent=parent,
            shared=shared,
            shared_messages=said if parent else 0,
            new_messages=before[said:] if parent else before,
            prompt_tail=tail,
            tools=tools,
            reply=reply,
            completion_ids=completion,
            logprobs=np.full(len(completion), _CERTAIN, np.float32),
            versions=(VersionSpan(version, len(completion)),),
            finish_reason="stop",
            sampling=SamplingParams(temperature=1.0, max_tokens=len(completion), seed=0),
            request_digest="",
            started_at=0.0,
            finished_at=0.0,
        )

    def _tokens(
        self,
        task: Task,
        before: tuple[ChatMessage, ...],
        said: int,
        reply: ChatMessage,
        tools: tuple[dict[str, Any], ...],
        last: Chat | None,
    ) -> tuple[int, Ids, Ids]:
        """Return the tokens of a prompt and its reply, as the model's template writes them."""
        renderer, room, known = self._runtime.renderer, self._runtime.config.max_context, last
        shown, offered = before, tools  # conversation in which the reply is shown
        if known is not None and renderer.independent_turns:
            # Rendering each prompt from its beginning would take quadratic time.
            shared = known.tokens
            found = renderer.extend(lambda: known.prompt_ids, known.completion_ids, before[said:], tools, room - shared)
            assert found is not None, "a format with independent turns can always continue"
            tail, shown, offered = found.ids, (text_message("user", "x"),), ()
            prompt = renderer.render(shown).ids
        else:
            prompt = renderer.render(before, tools, room).ids
            shared = 0 if last is None else common_tokens(TokenSequence(prompt), TokenSequence(last.ids))
            tail = prompt[shared:]
        completion = shown_reply(renderer, prompt, shown, reply, offered)
        if completion is None:
            raise ConfigError(
                f"task {task.task_id!r}: this model's template does not show reply {len(before)} after the prompt "
                "that the model would have been given"
            )
        return shared, tail, completion


class _TooLong(ConfigError):
    pass


class _Chosen(Sequence[Task]):
    """Some of the tasks, by position."""

    def __init__(self, tasks: Sequence[Task], positions: Sequence[int]) -> None:
        self._tasks, self._positions = tasks, positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, place: int) -> Task: ...

    @overload
    def __getitem__(self, place: slice) -> list[Task]: ...

    def __getitem__(self, place: int | slice) -> Task | list[Task]:
        if isinstance(place, slice):
            return [self._tasks[position] for position in self._positions[place]]
        return self._tasks[self._positions[place]]


def _most_tokens(given: Conversation) -> float:
    """Return a bound that no template exceeds, from the length of the texts: a token has at least one byte."""
    if any(not isinstance(part, TextPart) for message in given.messages for part in message.content):
        return math.inf  # the tokens of a picture depend on its size
    tools = orjson.dumps(given.tools, option=orjson.OPT_INDENT_2)
    frames = _LONGEST_FRAME + _FRAME_OF_MESSAGE * len(given.messages)
    return len(msgspec.json.encode(given.messages)) + 2 * len(tools) + frames


async def gather_recorded(
    store: RunStore,
    recordings: Recordings,
    tasks_of: TasksOf,
    step: int,
    groups: int,
    versions: Mapping[str, PolicyVersion],
) -> Gathered:
    """Enter a step's missing recorded episodes into the store, and return all of them.

    The first task of a group is that of all its episodes, see `gather_groups`; `groups` counts the step's. `versions`,
    before the step, has exactly one.
    """
    (version,) = versions.values()
    there = await store.groups.of_step("train", step)
    for _ in range(groups - len(there)):
        index = await store.groups.next_index("train")
        tasks = await tasks_of(step, (index,))
        await store.groups.register_recorded(index, step, await recordings.episodes(tasks[index][0], version))
    return await of_step(store, step)


async def of_step(store: RunStore, step: int) -> Gathered:
    """Return the episodes of a step whose groups are all in the store."""
    found = await store.groups.of_step("train", step)
    names = tuple(episode.episode_id for _, episodes in found for episode in episodes)
    trajectories = await store.calls.trajectories(names)
    return Gathered(episode_ids=names, trajectories=trajectories)
