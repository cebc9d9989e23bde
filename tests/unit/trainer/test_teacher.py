"""A teacher's logprobs are those of its own model; one with another tokenizer is refused when the policy is created."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.models.loading import LoadedModels
from palestra.trainer.base import PolicySpec
from palestra.trainer.torch_trainer import TorchTrainer
from unit.trainer.networks import load, networks
from unit.trainer.test_torch_trainer import batch_of_two_groups


async def test_the_teachers_logprobs_are_those_of_a_policy_with_its_model():
    samples = batch_of_two_groups()
    async with networks(model="tiny") as other:
        wanted = (await other.forward("policy", samples, {"old_logprobs"}))["old_logprobs"]
    async with networks(model="sharp", teacher="tiny") as trainer:
        found = await trainer.forward("policy", samples, {"teacher_logprobs", "old_logprobs"})
        assert found.keys() == {"teacher_logprobs", "old_logprobs"}
        for teacher, tiny, own in zip(found["teacher_logprobs"], wanted, found["old_logprobs"], strict=True):
            assert np.array_equal(teacher, tiny, equal_nan=True)
            assert not np.array_equal(teacher, own, equal_nan=True)


async def test_a_teacher_with_another_tokenizer_is_refused():
    class OtherTokenizer:
        def get_vocab(self):
            return {"a": 0}

    def loads(name, dtype, device):
        model, tokenizer = load(name, dtype, device)
        return model, OtherTokenizer() if name == "other" else tokenizer

    trainer = TorchTrainer(TrainerConfig(threads=1), 2, LoadedModels(loads))
    try:
        with pytest.raises(ConfigError, match=r"teacher.*'other'"):
            await trainer.create("policy", PolicySpec(model="sharp", teacher="other"))
    finally:
        await trainer.close()
