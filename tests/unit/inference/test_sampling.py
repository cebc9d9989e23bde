from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra.inference.draw import uniform
from palestra.inference.sampling import sample

V = 50


def logits(rows: int, scale: float = 3.0, vocabulary: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn((rows, vocabulary), generator=generator) * scale


def distribution(row: torch.Tensor, temperature: float, banned=()) -> np.ndarray:
    """softmax(row / temperature) in numpy's float64."""
    scores = row.double().numpy() / temperature
    scores[list(banned)] = -np.inf
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def run(scores: torch.Tensor, temperature: float, uniforms, banned=()):
    rows = len(scores)
    return sample(scores, [temperature] * rows, list(uniforms), [banned] * rows)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_distribution_function_is_inverted(temperature):
    scores = logits(300)
    uniforms = [uniform(0, i) for i in range(300)]
    chosen, _ = run(scores, temperature, uniforms)
    for row, u, token in zip(scores, uniforms, chosen, strict=True):
        cumulative = np.cumsum(distribution(row, temperature))
        below, upto = (cumulative[token - 1] if token else 0.0), cumulative[token]
        assert below - 1e-5 <= u <= upto + 1e-5


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_softmax_says(temperature):
    """Chi-square, 20,000 draws over 8 tokens; 24.3 would be exceeded once in a thousand times (7 degrees)."""
    row = logits(1, scale=1.0, vocabulary=8)
    chosen, _ = run(row.expand(20_000, -1), temperature, (uniform(1, i) for i in range(20_000)))
    wanted = distribution(row[0], temperature) * 20_000
    seen = np.bincount(chosen, minlength=8)
    assert ((seen - wanted) ** 2 / wanted).sum() < 24.3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_are_of_the_distribution_that_was_sampled_from(temperature):
    """Trap 5: of softmax(logits / temperature), not of softmax(logits)."""
    scores = logits(100)
    chosen, logprobs = run(scores, temperature, (uniform(2, i) for i in range(100)))
    wanted = [math.log(distribution(row, temperature)[token]) for row, token in zip(scores, chosen, strict=True)]
    assert logprobs == pytest.approx(wanted, abs=2e-6 * 20)


def test_greedy_takes_the_largest_and_says_its_probability_at_temperature_one():
    scores = logits(50)
    chosen, logprobs = run(scores, 0.0, (uniform(3, i) for i in range(50)))
    assert chosen == scores.argmax(dim=1).tolist()
    wanted = [math.log(distribution(row, 1.0)[token]) for row, token in zip(scores, chosen, strict=True)]
    assert logprobs == pytest.approx(wanted, abs=1e-5)


def test_rows_may_have_temperatures_of_their_own():
    scores = logits(1).expand(4, -1)
    temperatures = [0.0, 1.0, 0.2, 3.0]
    uniforms = [0.999, 0.7, 0.7, 0.7]
    together = sample(scores, temperatures, uniforms, [()] * 4)
    for i in range(4):
        alone = sample(scores[i : i + 1], temperatures[i : i + 1], uniforms[i : i + 1], [()])
        assert (together[0][i], together[1][i]) == (alone[0][0], alone[1][0])


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("banned", [(0,), (V - 1,), tuple(range(0, V, 2)), tuple(range(1, V))])
def test_banned_tokens_are_never_drawn_and_the_others_share_what_they_had(temperature, banned):
    scores = logits(200)
    scores[:, list(banned)] += 10.0  # they would be drawn nearly always
    edges = [0.0, 1 - 2.0**-53, 0.5]
    uniforms = [*edges, *(uniform(4, i) for i in range(197))]
    chosen, logprobs = run(scores, temperature, uniforms, banned)
    assert not set(chosen) & set(banned)
    wanted = [
        math.log(distribution(row, temperature or 1.0, banned)[token])
        for row, token in zip(scores, chosen, strict=True)
    ]
    assert logprobs == pytest.approx(wanted, abs=4e-5)


def test_the_callers_logits_are_left_alone():
    scores = logits(3)
    before = scores.clone()
    sample(scores, [1.0, 0.0, 0.5], [0.1] * 3, [(1,), (2,), (3,)])
    sample(scores, [1.0, 0.0, 1.0], [0.1] * 3, [(1,), (2,), (3,)])
    assert torch.equal(scores, before)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(u):
    """Token 0 and the last have probability 0: neither end may fall on them."""
    scores = logits(64)
    scores[:, 0] = scores[:, -1] = float("-inf")
    chosen, logprobs = run(scores, 1.0, [u] * 64)
    assert all(0 < token < V - 1 for token in chosen)
    assert all(math.isfinite(p) for p in logprobs)


def test_a_token_of_probability_one_is_always_drawn_with_logprob_zero():
    scores = torch.full((3, V), -1e4)
    scores[:, 7] = 0.0
    assert run(scores, 1.0, [0.0, 0.5, 1 - 2.0**-53]) == ([7, 7, 7], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype):
    scores = logits(20).to(dtype)
    uniforms = [uniform(5, i) for i in range(20)]
    assert run(scores, 0.7, uniforms) == run(scores.float(), 0.7, uniforms)


def test_a_rows_result_does_not_depend_on_its_neighbours():
    scores = logits(65, vocabulary=1000)
    uniforms = [uniform(6, i) for i in range(65)]
    together = run(scores, 1.0, uniforms)
    for i in range(0, 65, 8):
        alone = run(scores[i : i + 1], 1.0, uniforms[i : i + 1])
        assert (together[0][i], together[1][i]) == (alone[0][0], alone[1][0])


def test_over_a_large_vocabulary_every_token_can_be_drawn():
    """49,152 tokens as in SmolLM2: a float32 running sum would lose the last ones."""
    size = 49_152
    scores = torch.zeros((3, size))
    middle = (np.array([0, size // 2, size - 1]) + 0.5) / size
    chosen, _ = run(scores, 1.0, middle.tolist())
    assert chosen == [0, size // 2, size - 1]
