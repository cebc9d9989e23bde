"""`check_algorithm` finds the usual mistakes, each in an algorithm that is right but for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from palestra import check_algorithm
from palestra.algorithms.actor_critic import A2C, PPO
from palestra.algorithms.base import Algorithm, TokenAdvantages
from palestra.algorithms.loss import LOSSES, Loss, LossOutput, LossSpec, Mean
from palestra.algorithms.policy_gradient import PolicyGradient
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.config import OwnAlgorithmConfig, parse_config
from palestra.errors import InvalidAlgorithm
from unit.algorithms.own_algorithm import Surprise

pytestmark = pytest.mark.ci


class Right(Algorithm):
    """REINFORCE with the group's mean as baseline."""

    def advantages(self, groups, forward):
        found = []
        for group in groups:
            rewards = {t.episode.episode_id: t.episode.reward for t in group.trajectories}
            baseline = np.mean(list(rewards.values()))
            found += [self.of_row(row, rewards[row.episode_id] - baseline, group) for row in group.rows]
        return TokenAdvantages(advantages=found, metrics={})

    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage, np.float32)

    def loss(self):
        return LossSpec(name="importance_sampling")


class DividesByDeviation(Right):
    def of_row(self, row, advantage, group):
        deviation = np.std([t.episode.reward for t in group.trajectories])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.full(len(row.ids), np.float32(advantage) / np.float32(deviation), np.float32)


class SkipsEqualRewards(DividesByDeviation):
    """Has no advantages that are not finite, until a penalty trains groups of equal rewards as well."""

    def learns_from(self, trajectories):
        return len({trajectory.episode.reward for trajectory in trajectories}) > 1


class PromptsCount(Right):
    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage / row.loss_mask.argmax(), np.float32)


class PaddingCounts(Right):
    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage / (len(row.ids) - row.loss_mask.argmax()), np.float32)


class ReadsMaskedNumbers(Right):
    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage * np.nan_to_num(row.logprobs).mean(), np.float32)


class CallsCount(Right):
    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage / (1 + row.calls.max()), np.float32)


class RowsCount(Right):
    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage / row.loss_mask.sum(), np.float32)


class MeanOverRows(Right):
    """Where all episodes have equally many rows, the mean over rows is that over episodes."""

    def advantages(self, groups, forward):
        found = []
        for group in groups:
            rewards = {t.episode.episode_id: t.episode.reward for t in group.trajectories}
            baseline = np.mean([rewards[row.episode_id] for row in group.rows])
            found += [self.of_row(row, rewards[row.episode_id] - baseline, group) for row in group.rows]
        return TokenAdvantages(advantages=found, metrics={})


class MeanOverCalls(Right):
    def advantages(self, groups, forward):
        found = []
        for group in groups:
            rewards = {t.episode.episode_id: t.episode.reward for t in group.trajectories}
            baseline = np.mean([rewards[t.episode.episode_id] for t in group.trajectories for _ in t.chats])
            found += [self.of_row(row, rewards[row.episode_id] - baseline, group) for row in group.rows]
        return TokenAdvantages(advantages=found, metrics={})


class TakesRowsForEpisodes(Right):
    def advantages(self, groups, forward):
        found = []
        for group in groups:
            of_rows = [group.trajectories[n % len(group.trajectories)] for n in range(len(group.rows))]
            found += [
                np.full(len(r.ids), t.episode.reward, np.float32) for r, t in zip(group.rows, of_rows, strict=True)
            ]
        return TokenAdvantages(advantages=found, metrics={})


class WrongShapes(Right):
    def of_row(self, row, advantage, group):
        return np.full(int(row.loss_mask.sum()), advantage, np.float32)


class Undeclared(Right):
    def advantages(self, groups, forward):
        return TokenAdvantages(advantages=super().advantages(groups, forward).advantages, metrics={"new": 1.0})


class Forgets(Right):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = 0

    def of_row(self, row, advantage, group):
        return np.full(len(row.ids), advantage + self.seen, np.float32)

    def advantages(self, groups, forward):
        found = super().advantages(groups, forward)
        self.seen += 1
        return found


class NoJSON(Right):
    def state(self):
        return {"baseline": np.float32(1.0)}


class WithLoss(Right):
    name = ""

    def loss(self):
        return LossSpec(name=self.name)


@dataclass(frozen=True)
class DividesByTokens(Loss):
    def __call__(self, inputs):
        return LossOutput(loss=-inputs.advantages * inputs.logprobs / len(inputs.logprobs), metrics={})


@dataclass(frozen=True)
class AddsUp(Loss):
    def __call__(self, inputs):
        return LossOutput(loss=-(inputs.advantages * inputs.logprobs).sum(), metrics={})


@dataclass(frozen=True)
class NoNumber(Loss):
    def __call__(self, inputs):
        return LossOutput(
            loss=inputs.logprobs / inputs.advantages.abs().clamp(min=0) * 0 * inputs.logprobs.log(), metrics={}
        )


@dataclass(frozen=True)
class UndeclaredMetric(Loss):
    def __call__(self, inputs):
        return LossOutput(loss=-inputs.advantages * inputs.logprobs, metrics={"new": Mean(inputs.advantages)})


@dataclass(frozen=True)
class NearTheReference(Loss):
    def __call__(self, inputs):
        away = inputs.logprobs - inputs.reference_logprobs
        return LossOutput(loss=-inputs.advantages * inputs.logprobs + 0.1 * away**2, metrics={})


def test_a_loss_reads_the_references_logprobs_where_the_algorithm_needs_them(monkeypatch):
    class WithReference(WithLoss):
        needs = frozenset({"reference_logprobs"})

    monkeypatch.setattr(NearTheReference, "name", "near", raising=False)
    monkeypatch.setitem(LOSSES, "near", NearTheReference)
    monkeypatch.setattr(WithReference, "name", "near")
    check_algorithm(WithReference)


def test_an_algorithm_that_is_right_passes():
    check_algorithm(Right)
    check_algorithm(Surprise)
    check_algorithm(lambda: Right(OwnAlgorithmConfig(name="own:Right")))


def test_settings_of_the_class_are_where_it_reads_them():
    class Scaled(Right):
        def of_row(self, row, advantage, group):
            return np.full(len(row.ids), advantage * self.config.settings["scale"], np.float32)

    check_algorithm(Scaled, {"scale": 2.0})
    with pytest.raises(KeyError, match="scale"):
        check_algorithm(Scaled)


def test_an_algorithm_that_trains_every_choice_is_not_tried():
    with pytest.raises(InvalidAlgorithm, match="every choice"):
        check_algorithm(lambda: create_algorithm(parse_config({"algorithm": {"name": "sac"}}).algorithm))


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("name", [name for name, made in ALGORITHMS.items() if not made.every_choice])
def test_every_algorithm_that_ships_passes(name, other):
    """Also with a correction, or with turns as the actions that a critic judges."""
    variant = {"gae_level": "turn"} if ALGORITHMS[name] in (PPO, A2C) else {}
    if issubclass(ALGORITHMS[name], PolicyGradient):
        variant = {"importance_sampling": "token-truncate"}
    settings = {"name": name} | (variant if other else {})
    check_algorithm(lambda: create_algorithm(parse_config({"algorithm": settings}).algorithm))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            SkipsEqualRewards,
            "penalty trains",
        ),
        (
            DividesByDeviation,
            r"finite.*equal",
        ),
        (PromptsCount, "sampled matter"),
        (PaddingCounts, "padding matters"),
        (ReadsMaskedNumbers, "sampled matter"),
        (CallsCount, r"matters.*calls"),
        (RowsCount, "into rows"),
        (MeanOverRows, "episode counts"),
        (MeanOverCalls, "episode counts"),
        (TakesRowsForEpisodes, "into rows"),
        (WrongShapes, r"shapes.*9"),
        (Undeclared, r"metrics.*\['new'\]"),
        (Forgets, "checkpoint's state"),
        (NoJSON, "JSON"),
        (dict, r"dict.*palestra.Algorithm"),
        (lambda: 3, r"int.*palestra.Algorithm"),
    ],
)
def test_a_mistake_is_named(algorithm, said):
    with pytest.raises(InvalidAlgorithm, match=said):
        check_algorithm(algorithm)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (DividesByTokens, r"depends.*micro-batches"),
        (AddsUp, r"numbers.*78"),
        (NoNumber, r"gradient.*finite"),
        (UndeclaredMetric, r"reports.*\['new'\].*`metrics`"),
    ],
)
def test_a_mistake_of_a_loss_is_named(monkeypatch, loss, said):
    monkeypatch.setattr(loss, "name", "mine", raising=False)
    monkeypatch.setitem(LOSSES, "mine", loss)
    monkeypatch.setattr(WithLoss, "name", "mine")
    with pytest.raises(InvalidAlgorithm, match=said):
        check_algorithm(WithLoss)
