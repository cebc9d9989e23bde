"""The source run of recorded episodes: its policies, its episodes, and whose rewards count."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from palestra.config import SAVED_CONFIG, JobConfig, Roles, load_config
from palestra.errors import ConfigError
from palestra.session import PolicyRuntime
from palestra.store.browsing import browse, called_by, list_episodes


def learned_policies(run_dir: Path, policy: str | None, learner: str) -> tuple[str, ...]:
    """Return the policies of a run whose calls and rewards are learned from.

    Args:
        policy: named by the job; None: none.
        learner: the learning policy, whose name is the default.
    """
    trained = source_config(run_dir).trained_policies
    chosen = policy or learner
    if chosen in trained:
        return (chosen,)
    if policy is None and len(trained) == 1:
        return trained
    known = " and ".join(map(repr, trained))
    if policy is not None:
        raise ConfigError(f"algorithm.from_policy: the run in {run_dir} has trained {known}, and not {policy!r}")
    raise ConfigError(
        f"algorithm.from_run: the run in {run_dir} has trained {known}, and {learner!r} learns from the calls and "
        f"rewards of one: name it in algorithm.from_policy"
    )


def source_config(run_dir: Path) -> JobConfig:
    """Return the configuration of a run."""
    _check_run(run_dir)
    return load_config(run_dir / SAVED_CONFIG)


def check_tokens(config: JobConfig, policies: Sequence[str], run_dir: Path, runtime: PolicyRuntime) -> None:
    """Raise ConfigError for a run whose tokens are not the learning policy's.

    Args:
        policies: of the run, to learn from.
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
    """Return the rewards of a recorded episode that belong to the learned calls.

    Args:
        policies: of the run, to learn from.
        players: of roles with a pool in the episode.
        rewards: of the episode, by agent.
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


def chosen_episodes(run_dir: Path, policies: Sequence[str], min_reward: float | None) -> list[str]:
    """Return the ids of a run's completed training episodes with enough reward, in canonical order.

    Args:
        policies: of the run, to learn from; one of several trained policies must have called in each episode, and its
            own reward counts.
        min_reward: None: any.
    """
    roles = source_config(run_dir).players
    with browse(run_dir / "run.db") as connection:
        found = [
            each for each in list_episodes(connection, "train", "completed", sys.maxsize) if each.completion_tokens
        ]
        called = called_by(connection, policies[0]) if is_apart(roles, policies) else None
    rewarded = [
        (each.episode_id, sum(recorded_rewards(roles, policies, each.players, each.rewards).values()))
        for each in found
        if each.rewards is not None and (called is None or each.episode_id in called)
    ]
    names = [name for name, reward in rewarded if min_reward is None or reward >= min_reward]
    if not names:
        best = max((reward for _, reward in rewarded), default=None)
        most = "it has none at all" if best is None else f"the largest reward is {best:g}"
        raise ConfigError(
            f"algorithm.from_run: the run in {run_dir} has no training episode with a reward of at least "
            f"{min_reward}; {most}"
        )
    return names
