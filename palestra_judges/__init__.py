"""Rewards by judgement: a language model judges what was played, by criteria or by comparing the episodes of a group.

    palestra.train(reward=palestra_judges.Rubric(criteria=[…], url="http://10.0.0.5:8000"), tasks=…)

or the table `[judge]` of a configuration. What a judged text says is data to the judge, and a judge that fails gives no
reward. A package of another author brings judges in the same way; see `palestra.envs.judge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra_judges.config import Criterion, Relative, RewardModel, Rubric

__all__ = ["Criterion", "Relative", "RewardModel", "Rubric"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'palestra_judges' has no attribute {name!r}")
    from palestra_judges import config  # when it is used, so that the help of a command loads none of it

    return getattr(config, name)
