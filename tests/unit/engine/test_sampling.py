from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra.engine.base import uniform
from palestra.engine.embedded.sampling import RowSampling, _draw, _keep_top, sample
from palestra.types.calls import SamplingParams

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


def row_of(uniform: float, temperature: float = 1.0, banned=(), counts=None, allowed=None, **how) -> RowSampling:
    sampling = SamplingParams(temperature=temperature, max_tokens=1, seed=0, **how)
    return RowSampling(sampling=sampling, uniform=uniform, banned=banned, counts=counts or {}, allowed=allowed)


def run(scores: torch.Tensor, temperature: float, uniforms, banned=()):
    drawn = sample(scores, [row_of(u, temperature, banned) for u in uniforms])
    return drawn.tokens, drawn.logprobs


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
    together = sample(scores, [row_of(u, t) for u, t in zip(uniforms, temperatures, strict=True)])
    for i in range(4):
        alone = sample(scores[i : i + 1], [row_of(uniforms[i], temperatures[i])])
        assert (together.tokens[i], together.logprobs[i]) == (alone.tokens[0], alone.logprobs[0])


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
    sample(scores, [row_of(0.1, t, (n,)) for n, t in enumerate((1.0, 0.0, 0.5))])
    sample(scores, [row_of(0.1, 1.0, top_k=2), row_of(0.1, 1.0, top_p=0.5), row_of(0.1, 1.0, logit_bias=((1, 9.0),))])
    sample(scores, [row_of(0.1), row_of(0.1, counts={3: 1}, presence_penalty=1.0), row_of(0.1, top_k=1)])
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


# What reshapes the distribution, each against numpy's float64


def reference(row: torch.Tensor, temperature=1.0, bias=None, counts=None, presence=0.0, frequency=0.0, k=0, p=1.0):
    """The distribution that is sampled from, written out a second time."""
    scores = row.double().numpy().copy()
    for token, added in (bias or {}).items():
        scores[token] += added
    for token, times in (counts or {}).items():
        scores[token] -= presence + frequency * times
    scores = scores / temperature
    order = np.argsort(-scores, kind="stable")
    if k:
        scores[order[k:]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    kept, total = [], 0.0
    for token in order:
        if total >= p:
            break
        kept.append(token)
        total += weights[token]
    out = np.zeros_like(weights)
    out[kept] = weights[kept] / weights[kept].sum()
    return out


CASES = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": V + 10},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_k": 8, "top_p": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"presence_penalty": -2.0, "frequency_penalty": 1.0, "top_p": 0.8},
    {"logit_bias": ((3, 5.0), (7, -100.0))},
]


@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_what_is_drawn_and_its_logprob_are_of_the_reshaped_distribution(how, temperature):
    scores = logits(200)
    counts = {1: 2, 4: 1, 9: 5}
    rows = [row_of(uniform(5, i), temperature, counts=counts, **how) for i in range(200)]
    drawn = sample(scores, rows)
    names = {"presence_penalty": "presence", "frequency_penalty": "frequency", "top_k": "k", "top_p": "p"}
    told = {names[name]: value for name, value in how.items() if name in names}
    for row, token, logprob, one in zip(scores, drawn.tokens, drawn.logprobs, rows, strict=True):
        wanted = reference(row, temperature, dict(how.get("logit_bias", ())), counts, **told)
        assert wanted[token] > 0
        assert logprob == pytest.approx(math.log(wanted[token]), abs=1e-4)
        cumulative = np.cumsum(wanted)
        assert (cumulative[token - 1] if token else 0.0) - 1e-5 <= one.uniform <= cumulative[token] + 1e-5


def test_the_most_probable_tokens_are_those_of_the_distribution_that_was_sampled_from():
    scores = logits(1)
    drawn = sample(scores, [row_of(0.5, 0.7, top_k=3, top_logprobs=5)])
    wanted = reference(scores[0], 0.7, k=3)
    ids = [token for token, _ in drawn.top[0]]
    assert ids[:3] == np.argsort(-wanted)[:3].tolist()
    assert [p for _, p in drawn.top[0][:3]] == pytest.approx(np.log(wanted[ids[:3]]).tolist(), abs=1e-5)
    assert sample(scores, [row_of(0.5)]).top == [()]


def test_only_what_is_allowed_is_drawn_even_if_it_is_a_stop_token_before_min_tokens():
    scores = logits(50)
    allowed = torch.zeros(V, dtype=torch.bool)
    allowed[[2, 11]] = True
    drawn = sample(scores, [row_of(uniform(6, i), allowed=allowed) for i in range(50)])
    assert set(drawn.tokens) == {2, 11}
    assert set(sample(scores, [row_of(uniform(6, i), allowed=allowed, banned=(2,)) for i in range(50)]).tokens) == {11}
    forced = sample(scores, [row_of(uniform(6, i), allowed=allowed, banned=(2, 11)) for i in range(50)])
    assert set(forced.tokens) == {2, 11}


@pytest.mark.parametrize("vocabulary", [255, 256, 257, 1000, 49_152])
def test_the_distribution_function_of_a_large_vocabulary_is_inverted(vocabulary):
    """Blocks and tokens are found one after the other; the sum over all tokens in float64 is the oracle."""
    scores = logits(64, vocabulary=vocabulary)
    uniforms = [0.0, 1e-12, 0.5, 1 - 2**-53, *(uniform(5, i) for i in range(60))]
    chosen, logprobs = run(scores, 1.0, uniforms)
    for row, u, token, logprob in zip(scores, uniforms, chosen, logprobs, strict=True):
        weights = distribution(row, 1.0)
        cumulative = np.cumsum(weights)
        assert (cumulative[token - 1] if token else 0.0) - 1e-5 <= u <= cumulative[token] + 1e-5
        assert logprob == pytest.approx(math.log(weights[token]), abs=1e-5)


@pytest.mark.parametrize("kept", [(0,), (255,), (256,), (999,), (3, 700)])
@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(kept, u):
    scores = torch.full((3, 1000), -torch.inf)
    scores[:, list(kept)] = 1.0
    chosen, logprobs = run(scores, 1.0, [u] * 3)
    assert set(chosen) <= set(kept)
    assert logprobs == pytest.approx([-math.log(len(kept))] * 3, abs=1e-6)


def test_what_is_drawn_does_not_depend_on_the_rows_beside_it():
    scores, uniforms = logits(40, vocabulary=49_152), [uniform(6, i) for i in range(40)]
    together = run(scores, 1.0, uniforms)
    alone = [run(scores[n : n + 1], 1.0, uniforms[n : n + 1]) for n in range(40)]
    assert together == ([tokens[0] for tokens, _ in alone], [logprobs[0] for _, logprobs in alone])


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-39, 5e-324])
def test_any_temperature_above_zero_is_one(temperature):
    """Scores by such a temperature would be infinite in float32, and the difference of two of them no number."""
    drawn = sample(torch.tensor([[0.0, 300.0, 299.0], [1.0, 2.0, 0.0]]), [row_of(0.9, temperature), row_of(0.999, 1.0)])
    assert drawn.tokens == [1, 2]
    assert drawn.logprobs[0] == 0.0
    assert drawn.logprobs[1] == pytest.approx(-2.40760596, abs=1e-6)


def test_scores_that_are_no_numbers_are_said_of_their_row_alone():
    scores = logits(3)
    scores[1] = math.nan
    drawn = sample(scores, [row_of(0.4), row_of(0.4), row_of(0.4)])
    assert math.isnan(drawn.logprobs[1])
    assert [drawn.tokens[n] for n in (0, 2)] == [sample(scores[n : n + 1], [row_of(0.4)]).tokens[0] for n in (0, 2)]


def test_no_token_without_probability_is_drawn_beside_the_end_of_a_block():
    """Where sums are rounded, what is left of a number within its block may be below zero."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        row = torch.randn(20 * 256, generator=generator) * 14
        row[::256] = -math.inf
        weights = row.softmax(-1)
        ends = weights.view(-1, 256).sum(-1).double().cumsum(0)
        near = [int(end * 2**53) + step for end in (ends / ends[-1]).tolist() for step in range(-2, 3)]
        uniforms = [k * 2.0**-53 for k in near if 0 <= k < 2**53]
        assert (weights[_draw(weights.expand(len(uniforms), -1), uniforms)] > 0).all()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999999])
def test_a_top_p_keeps_as_many_tokens_as_float64_does(top_p):
    scores = logits(1, scale=6.0, vocabulary=50_000)
    weights = scores[0].double().softmax(-1).sort(descending=True).values
    wanted = int((weights.cumsum(0) - weights < top_p).sum())
    kept = scores.clone()
    _keep_top(kept, [0], [row_of(0.5, top_p=top_p).sampling])
    assert int(kept.isfinite().sum()) == wanted
