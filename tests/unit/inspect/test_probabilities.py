"""Probabilities of choices, against those that transformers' own model gives to the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra import ChoiceQuestion, choice_probabilities
from palestra.errors import ConfigError, NotFound
from palestra.models.catalog import model_folder
from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import select_renderer
from palestra.types.messages import text_message

TINY = "tiny-random"


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def transformers_logits(prompt: list[int], reply: list[int]) -> np.ndarray:
    """[C, V] scores before each token of a reply."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder(TINY), dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1].double().numpy()


def of_paths(text: str, choices: list[str], temperature: float) -> dict[str, float]:
    """Written out for a tokenizer in which every byte is a token, so that each choice is written in one way."""
    tokenizer = load_tokenizer(TINY)
    prompt = select_renderer(tokenizer).render([text_message("user", text)]).ids.tolist()
    found = {}
    for choice in choices:
        reply = [*tokenizer.encode(choice), tokenizer.eos_token_id]
        scores, logprob = transformers_logits(prompt, reply) / temperature, 0.0
        for place, token in enumerate(reply):
            alike = [[*tokenizer.encode(c), tokenizer.eos_token_id] for c in choices]
            allowed = sorted({one[place] for one in alike if one[:place] == reply[:place]})
            logprob += scores[place, token] - np.logaddexp.reduce(scores[place, allowed])
        found[choice] = math.exp(logprob)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("choices", [["a", "b"], ["pass", "past", "bet", "be"], ["ä", "ö"], ["only"]])
def test_they_are_those_of_transformers_under_the_choices(choices, temperature):
    question = ChoiceQuestion(messages=asked("K"), choices=choices)
    (found,) = choice_probabilities(TINY, [question], temperature=temperature)
    assert list(found) == choices
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    assert found == pytest.approx(of_paths("K", choices, temperature), rel=1e-4)


def test_questions_do_not_know_of_each_other():
    questions = [ChoiceQuestion(messages=asked(text), choices=["a", "b", "c"]) for text in ("x", "yy", "zzz")]
    together = choice_probabilities(TINY, questions)
    assert len({tuple(answer.values()) for answer in together}) == 3
    for question, answer in zip(questions, together, strict=True):
        assert choice_probabilities(TINY, [question])[0] == pytest.approx(answer, rel=1e-5)
    assert choice_probabilities(TINY, []) == []


def test_what_can_not_be_answered_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"question.*1"):
        choice_probabilities(TINY, [ChoiceQuestion(messages=asked("x"), choices=c) for c in (["a"], [])])
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="above 0"):
            choice_probabilities(TINY, [], temperature=temperature)
    (tmp_path / "run.db").touch()
    with pytest.raises(NotFound, match="checkpoint yet"):
        choice_probabilities(str(tmp_path), [])
