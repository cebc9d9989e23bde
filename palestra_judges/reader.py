"""Reads a reward model, and scores the reply of a call: transformers' model for the classification of sequences."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForSequenceClassification

from palestra.errors import ConfigError, JudgeFailed, PalestraError
from palestra.models.causal_lm import load_tokenizer
from palestra.models.quiet import NO_CODE, NO_PICKLE, quiet_transformers
from palestra.renderers import select_renderer, shown_reply
from palestra.types.calls import Chat


class RewardModelReader:
    """A reward model in float32 on the CPU; it gives rewards to conversations that end with a reply."""

    def __init__(self, path: Path) -> None:
        """Load the model of a folder. Raises ConfigError: it is no reward model."""
        try:
            with quiet_transformers():
                if (labels := AutoConfig.from_pretrained(path, **NO_CODE).num_labels) != 1:
                    raise ConfigError(f"judge.path: the model in {path} has {labels} classes; such a model has one")
                model, loaded = AutoModelForSequenceClassification.from_pretrained(
                    path, dtype=torch.float32, output_loading_info=True, **NO_PICKLE
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"judge.path: {path} is no model for the classification of sequences: {error}") from error
        if missing := sorted(loaded["missing_keys"]):  # it would have random values
            raise ConfigError(f"judge.path: {path} is no reward model: it has no {missing[0]}")
        model.config.get_text_config().pad_token_id = None  # the last token is read, which may be the padding token
        self._model, self._renderer = model.eval(), select_renderer(load_tokenizer(str(path)))

    def score(self, answer: Chat) -> tuple[float, int]:
        """Return the reward of a call's reply, and the number of tokens that were read.

        Raises:
            JudgeFailed: the model can't be shown the reply, or gives no number.
        """
        renderer, config = self._renderer, self._model.config.get_text_config()
        try:
            prompt = renderer.render(answer.messages, answer.tools).ids
            reply = shown_reply(renderer, prompt, answer.messages, answer.reply, answer.tools)
        except (PalestraError, ValueError, KeyError, TemplateError) as error:
            raise JudgeFailed(f"the reward model can't be shown the reply: {error}") from error
        if reply is None:
            raise JudgeFailed("the template of the reward model does not show the reply after its prompt")
        if answer.finish_reason == "length":  # a reply that was cut has no end
            reply = reply[:-1]
        ids = np.concatenate((prompt, reply))
        if len(ids) > (most := int(config.max_position_embeddings)):
            raise JudgeFailed(f"the reply ends after {len(ids):,} tokens, and the reward model reads {most:,}")
        with torch.inference_mode():
            score = float(self._model(torch.tensor(ids[None].astype(np.int64))).logits[0, 0])
        if not math.isfinite(score):
            raise JudgeFailed(f"the reward model gave {score}")
        return score, len(ids)
