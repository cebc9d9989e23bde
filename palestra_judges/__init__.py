"""Rewards by judgement: a language model judges what was played, by criteria or by comparing the episodes of a group.

    palestra.train(reward=palestra_judges.Rubric(criteria=[…], url="http://10.0.0.5:8000"), tasks=…)

or the table `[judge]` of a configuration. What a judged text says is data to the judge, and a judge that fails gives no
reward. A package of another author brings judges in the same way; see `palestra.envs.judge`.
"""

from palestra_judges.config import Criterion, Relative, Rubric

__all__ = ["Criterion", "Relative", "Rubric"]
