"""Loads the networks of a policy: the trained ones, and the frozen reference and teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from palestra.algorithms.base import ForwardOutput
from palestra.errors import ConfigError
from palestra.models.causal_lm import CausalLM
from palestra.models.loading import LoadedModels
from palestra.trainer.base import PolicySpec


@dataclass(frozen=True, slots=True)
class NetworkLoading:
    """Loads networks for one trainer.

    Attributes:
        dtype: precision of products, and of weights that never change.
    """

    models: LoadedModels
    dtype: torch.dtype
    device: torch.device

    def trained(self, spec: PolicySpec, seed: int) -> tuple[CausalLM, Any]:
        """Load a model in float32, all of whose weights or an adapter are trained, and its tokenizer."""
        if spec.adapter is None:
            model, tokenizer = self.models.own(spec.model, torch.float32, self.device, spec.vision)
            if model.vision is not None and model.vision.trained:
                model.vision.kept = None  # every update changes what its tower makes of a picture
            return model, tokenizer
        return self.models.adapted(spec.model, spec.adapter, seed, self.dtype, self.device)

    def frozen(self, spec: PolicySpec, policy: CausalLM, tokenizer: Any) -> dict[ForwardOutput, CausalLM]:
        """Load the frozen models in the precision of products, by the output that each computes.

        Raises:
            ConfigError: a model has another tokenizer than the policy.
        """
        found: dict[ForwardOutput, CausalLM] = {}
        if spec.reference is not None:
            found["reference_logprobs"] = self._frozen("reference", spec.reference, policy, tokenizer)
        if spec.teacher is not None:
            found["teacher_logprobs"] = self._frozen("teacher", spec.teacher, policy, tokenizer)
        return found

    def _frozen(self, what: str, name: str, policy: CausalLM, tokenizer: Any) -> CausalLM:
        model, own = self.models.frozen(name, self.dtype, self.device)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the {what} {name!r} has another tokenizer than the policy, so its probabilities are of other "
                "texts; take a model of the same family"
            )
        if model.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"the {what} {name!r} has {model.vocab_size} tokens, and the policy {policy.vocab_size}; take a "
                "model with as many"
            )
        return model
