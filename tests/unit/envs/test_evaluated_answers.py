"""What a model writes is not run by scorers that evaluate it."""

from __future__ import annotations

import time

import pytest

from palestra_worlds.reasoning_gym import ReasoningEnvironment, may_be_scored

pytest.importorskip("reasoning_gym")
EVIL = [
    "open('{path}', 'w').write('x')",
    "__import__('os').system('touch {path}')",
    "[].__class__.__base__.__subclasses__()",
    "9**9**9**9",
    "9**(9**9)",
    "((((9**99)**99)**99)**99)**99",
    "9^9^9^9",
    "factorial(99999999)",
    "[0 for a in 'aaaaaaaaa' for b in 'bbbbbbbbb']",
    "lambda: 0",
    "x.subs",
    "exec('1')",
    "1" * 5000,
]
DATASETS = ["countdown", "puzzle24", "n_queens", "binary_matrix", "simple_integration", "polynomial_multiplication"]


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("text", EVIL)
def test_what_could_do_more_than_state_a_formula_scores_nothing_and_does_nothing(tmp_path, dataset, text):
    environment = ReasoningEnvironment(dataset)
    environment.reset({"seed": 3})
    began = time.monotonic()
    _, reward, terminated, _, _ = environment.step(text.format(path=tmp_path / "planted"))
    assert (reward <= 0.05, terminated) == (True, True)
    assert time.monotonic() - began < 2
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "(3 + 4) * 12 / 2 - 1"),
        ("n_queens", "_ Q _ _\n_ _ _ Q\nQ _ _ _\n_ _ Q _"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("spiral_matrix", "1 2 -3"),
        ("simple_integration", "3*X**3/2 + 7*X + C"),
        ("simple_integration", "-2*x^(1/2) + C"),
        ("intermediate_integration", "exp(2*x)/2 - sin(3*x + 1)**2 + C"),
        ("polynomial_multiplication", "(x**2 + 1)**3 - 4*x*y"),
        ("gsm_symbolic", "anything at all: open('x')"),
    ],
)
def test_answers_as_the_prompts_ask_for_are_scored(dataset, answer):
    assert may_be_scored(dataset, answer)
