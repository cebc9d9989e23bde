"""The trainer's probabilities of a constrained reply are those that the engine sampled it with."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.grammars.matcher import vocabulary_of
from palestra.grammars.pool import Grammars
from palestra.models.causal_lm import load_causal_lm, load_tokenizer
from palestra.trainer.constraints import GrammarMasks, allowed_tokens
from palestra.types.calls import GrammarSpan, SamplingParams
from unit.building import engine_request, make_chat, make_sample, rows_of
from unit.trainer.test_torch_trainer import training

pytestmark = pytest.mark.ci

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LOSS = LossSpec.of(PPOClipLoss())
GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))


async def sampled(prompt: np.ndarray, temperature: float, seed: int):
    """A reply that matches the grammar, with the logprobs that it was sampled with."""
    model, tokenizer = load_causal_lm("tiny-random", torch.float32), load_tokenizer("tiny-random")
    settings = EmbeddedEngineConfig(threads=1, dtype="float32", max_batch=4)
    grammars = Grammars(vocabulary_of(tokenizer, model.vocab_size))
    policy = PolicyModel(model=model, stop_ids=frozenset((258,)), grammars=grammars)
    engine = EmbeddedEngine({"policy": policy}, settings)
    how = SamplingParams(temperature=temperature, max_tokens=60, seed=seed, grammar=GRAMMAR)
    try:
        pieces = [piece async for piece in engine.generate(engine_request(prompt, how))]
    finally:
        await engine.close()
        grammars.close()
    return how, [piece.ids[0] for piece in pieces], [piece.logprobs[0] for piece in pieces]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_a_constrained_reply_has_the_same_probabilities_in_the_trainer(temperature):
    prompt = np.arange(1, 9, dtype=np.int32)
    how, ids, logprobs = await sampled(prompt, temperature, 3)
    chat = make_chat(prompt=prompt.tolist(), completion=ids, logprobs=logprobs, sampling=how)
    (row,) = rows_of([chat])
    assert row.grammars == (GrammarSpan(8, len(ids), GRAMMAR),)
    sample = make_sample(row.ids.tolist(), range(8, len(row.ids)), logprobs=logprobs, temperature=temperature)
    async with training(load_causal_lm("tiny-random", torch.float32)) as trainer:
        constrained = await trainer.forward_backward("policy", [replace(sample, grammars=row.grammars)], LOSS, "1")
    async with training(load_causal_lm("tiny-random", torch.float32)) as trainer:
        plain = await trainer.forward_backward("policy", [sample], LOSS, "1")
    assert constrained.metrics["logprob_gap_max"] < 1e-4
    assert np.isfinite(constrained.metrics["entropy"])
    assert plain.metrics["logprob_gap_max"] > 1.0  # the control: without the grammar they are far apart


async def test_a_row_that_trains_only_a_part_of_a_constrained_reply_goes_through_all_of_it():
    prompt = np.arange(1, 9, dtype=np.int32)
    how, ids, logprobs = await sampled(prompt, 1.0, 4)
    part = make_sample([*prompt.tolist(), *ids], range(10, 8 + len(ids)), logprobs=logprobs[2:])
    part = replace(part, grammars=(GrammarSpan(8, len(ids), how.grammar),))
    other = make_sample([5, 6, 7, 8], [2, 3])
    async with training(load_causal_lm("tiny-random", torch.float32)) as trainer:
        report = await trainer.forward_backward("policy", [part], LOSS, "1")
        assert report.metrics["logprob_gap_max"] < 1e-4
        together = await trainer.forward_backward("policy", [other, part], LOSS, "2")
    assert together.trained_tokens == len(ids)


async def test_a_tokenizer_may_know_more_tokens_than_the_model_has():
    """SmolLM2's does: its masks have a word more than the model's vocabulary needs."""
    prompt = np.arange(1, 9, dtype=np.int32)
    how, ids, logprobs = await sampled(prompt, 1.0, 3)
    (row,) = rows_of([make_chat(prompt=prompt.tolist(), completion=ids, logprobs=logprobs, sampling=how)])
    sample = replace(make_sample(row.ids.tolist(), range(8, len(row.ids)), logprobs=logprobs), grammars=row.grammars)
    tokenizer, size = load_tokenizer("tiny-random"), load_causal_lm("tiny-random", torch.float32).vocab_size
    found = []
    for known in (size, size + 33):
        grammars = Grammars(vocabulary_of(tokenizer, known))
        try:
            found.append(allowed_tokens([(sample, None, None)], GrammarMasks(grammars), size))
        finally:
            grammars.close()
    assert found[1].shape == (len(ids), (size + 31) // 32)
    assert torch.equal(*found)
