"""What the trial of a job plays and trains: the job's environment with luck on top, or what stands in for tasks."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig
from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.learner.shares import shares_of
from palestra.rollout import RolloutSpec
from palestra.runtime.environments import environment_of
from palestra.types.records import Trajectory

STAND_IN_WORDS = 200  # of a prompt where nothing says what prompts are like
TOKENS_OF_A_WORD = 5  # at most, of the words that stand in: one for each byte
# What half of the episodes get on top of their reward, so that every group has a gradient to measure. It is more than
# environments give, and a power of two, so that the environment's own reward can be separated from it afterwards.
LUCK = 2.0**20
LUCK_NAME = "palestra-check"  # of the luck, where rewards have names


def plays_episodes(config: JobConfig) -> bool:
    """Return whether training episodes are played; else recorded ones are trained."""
    return all(create_algorithm(config.algorithm_of(name)).recorded is None for name in config.trained_policies)


def has_stand_in(config: JobConfig) -> bool:
    """Return whether nothing of the job says what its training tasks are."""
    return config.tasks.train is None and config.environment.name is None and not config.brings_tasks


def conversation_words(config: JobConfig) -> int:
    """Return the words of a conversation that stands in for others: it has to fit into the model's context."""
    return min(STAND_IN_WORDS, config.policies[config.players.default].max_context // TOKENS_OF_A_WORD // 2)


def stand_in_task(config: JobConfig) -> dict[str, Any]:
    """Return the task that stands in for those that are pushed later: a question, or a conversation."""
    if plays_episodes(config):
        return {"prompt": "word " * STAND_IN_WORDS}
    half = "word " * (conversation_words(config) // 2)
    return {"messages": [{"role": "user", "content": half}, {"role": "assistant", "content": half}]}


def teaching_share_of(played: Iterable[Trajectory], config: JobConfig) -> float:
    """Return the share of groups that a policy learns from, by what the environment gave them.

    Of several trained policies it is the least share: that of the policy which learns from the fewest groups.

    Args:
        played: episodes, each completed one with a reward to which `LUCK` was added some number of times.
    """
    known = [_without_luck(trajectory) for trajectory in played if trajectory.episode.rewards is not None]
    return min(_share_of_policy(known, config, policy) for policy in config.trained_policies)


def _share_of_policy(played: Sequence[Trajectory], config: JobConfig, policy: str) -> float:
    """Return the share of groups that one policy learns from; see `teaching_share_of`."""
    algorithm = create_algorithm(config.algorithm_of(policy), config.rollout.step_order)
    groups: dict[int, list[Trajectory]] = {}
    for share in shares_of(played, policy, config.players):
        groups.setdefault(share.episode.group_index, []).append(share)
    return sum(map(algorithm.learns_from, groups.values())) / max(len(groups), 1)


def _without_luck(trajectory: Trajectory) -> Trajectory:
    """Return an episode with the rewards that the environment gave it."""
    episode = trajectory.episode
    named = {name: reward for name, reward in (episode.named_rewards or {}).items() if name != LUCK_NAME}
    steps = episode.step_rewards
    return replace(
        trajectory,
        episode=replace(
            episode,
            rewards={agent: _unlucky(reward) for agent, reward in (episode.rewards or {}).items()},
            step_rewards=None if steps is None else tuple(map(_unlucky, steps)),
            agent_step_rewards=None
            if (by_agent := episode.agent_step_rewards) is None
            else tuple(one._replace(reward=_unlucky(one.reward)) for one in by_agent),
            named_rewards=None if episode.named_rewards is None else named,
        ),
    )


def _unlucky(reward: float) -> float:
    return round(math.remainder(reward, LUCK), 6)


def trial_play(config: JobConfig) -> RolloutSpec:
    """Return what the trial plays: the job's environment, or one question that stands in for the user's agent."""
    make = environment_of(config) or _StandIn
    number = itertools.count()

    def made() -> ConcurrentEnvironment:
        found = make()
        system = config.environment.system
        environment = found if isinstance(found, ConcurrentEnvironment) else SerialEnvironment(found, system=system)
        luck, emit = LUCK * (next(number) % 2), environment.emit

        def emit_with_luck(agent: str, content: Any, **more: Any) -> Any:
            if isinstance(reward := more.get("reward"), Mapping):
                more["reward"] = {**reward, LUCK_NAME: luck}
            elif reward is not None:
                more["reward"] = reward + luck
            return emit(agent, content, **more)

        environment.emit = emit_with_luck  # type: ignore[method-assign]  # of this episode's environment alone
        return environment

    return RolloutSpec(environment=made)


class _StandIn(Environment):
    """One question, which is the task itself, and any answer."""

    blocking = False

    def reset(self, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Show the prompt of the task, or the task as JSON."""
        prompt = task.get("prompt")
        return (prompt if isinstance(prompt, str) else json.dumps(dict(task))), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", 0.0, True, False, {}
