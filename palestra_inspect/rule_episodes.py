"""Selects the episodes of a step that show a sign best, the clearest first."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.types.summaries import EpisodeSummary

Episodes = Sequence[EpisodeSummary]


def any_of(episodes: Episodes) -> Episodes:
    """Return the completed episodes."""
    return [one for one in episodes if one.reward is not None]


def without_calls(episodes: Episodes) -> Episodes:
    """Return the completed episodes without a model call."""
    return [one for one in any_of(episodes) if not one.calls]


def of_equal_groups(episodes: Episodes) -> Episodes:
    """Return the episodes of groups with several episodes and equal rewards."""
    rewards: dict[int, list[float]] = {}
    for one in episodes:
        if one.reward is not None:
            rewards.setdefault(one.group_index, []).append(one.reward)
    equal = {group for group, found in rewards.items() if len(found) > 1 and max(found) == min(found)}
    return [one for one in any_of(episodes) if one.group_index in equal]


def worst(episodes: Episodes) -> Episodes:
    """Return the completed episodes, lowest reward first."""
    return sorted(any_of(episodes), key=lambda one: one.reward or 0.0)


def best(episodes: Episodes) -> Episodes:
    """Return the completed episodes, highest reward first."""
    return worst(episodes)[::-1]


def longest(episodes: Episodes) -> Episodes:
    """Return the completed episodes, most sampled tokens first."""
    return sorted(any_of(episodes), key=lambda one: -one.tokens)


def failed(episodes: Episodes) -> Episodes:
    """Return discarded and retried episodes, most attempts first."""
    tried = [one for one in episodes if one.state == "discarded" or one.attempts > 1 or one.earlier_reason]
    return sorted(tried, key=lambda one: (one.state != "discarded", -one.attempts))


def forked(episodes: Episodes) -> Episodes:
    """Return the episodes with calls that lost exact tokens, most such calls first."""
    return sorted((one for one in episodes if one.forks), key=lambda one: -sum(one.forks.values()))


def none_of(episodes: Episodes) -> Episodes:
    """Return no episode, for a sign that episodes cannot show."""
    return []
