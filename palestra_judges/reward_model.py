"""`RewardModelJudge`: the reward of an episode is what a trained model of rewards gives its last reply."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.envs.judge import JudgedGroup, VerdictBook
from palestra.errors import ConfigError, JudgeFailed
from palestra.types.calls import Chat
from palestra.types.messages import text_message
from palestra.types.records import Verdict

if TYPE_CHECKING:
    from palestra.renderers.base import Renderer
    from palestra_judges.config import RewardModel

RUBRIC = "model of rewards"  # what is asked, in the key of a verdict


class RewardModelJudge:
    """Scores one episode at a time, in a thread, by transformers' model for the classification of sequences."""

    whole_groups = False

    def __init__(self, config: RewardModel) -> None:
        self._config = config
        self._lock = asyncio.Lock()  # one reply at a time has all cores
        self._loaded: tuple[Any, Renderer] | None = None
        self._version = ""

    async def open(self, book: VerdictBook) -> list[str]:
        """Load the model; see `Judge.open`."""
        self._version = await asyncio.to_thread(_digest, self._config.path)
        self._loaded = await asyncio.to_thread(_load, self._config.path)
        return []

    async def close(self) -> None:
        """Let go of the model."""
        self._loaded = None

    async def judge(self, group: JudgedGroup, book: VerdictBook) -> Mapping[str, Mapping[str, float]]:
        """Return the model's reward of the last reply; see `Judge.judge`."""
        (trajectory,) = group.trajectories
        name, agent = trajectory.episode.episode_id, group.judged.get(trajectory.episode.episode_id)
        key = group.key(RUBRIC, self._version)
        if (verdict := await book.known(key)) is None:
            answer = next((chat for chat in reversed(trajectory.chats) if agent in (None, chat.agent)), None)
            if answer is None:
                raise JudgeFailed("nothing was said that a model of rewards could read")
            started = time.monotonic()
            async with self._lock:
                score, tokens = await asyncio.to_thread(self._score, answer)
            verdict = Verdict(
                scores={name: {self._config.name: score}},
                reasons={},
                tokens=tokens,
                seconds=time.monotonic() - started,
            )
            await book.record(key, verdict)
        return verdict.scores

    def _score(self, answer: Chat) -> tuple[float, int]:
        """Return the reward of a call's reply, and the number of tokens that were read."""
        import torch

        assert self._loaded is not None, "opened before"
        model, renderer = self._loaded
        try:
            # Only a template with a message after the reply shows how the reply ends.
            prompt = len(renderer.render(answer.messages, answer.tools).ids)
            whole = renderer.render((*answer.messages, answer.reply, text_message("user", "x")), answer.tools).ids
        except (ValueError, KeyError) as error:
            raise JudgeFailed(f"the model of rewards can't be shown the reply: {error}") from error
        ends = np.flatnonzero(np.isin(whole[prompt:], renderer.stop_ids))
        if not len(ends):
            raise JudgeFailed("the model of rewards does not show how the reply ends")
        ids = whole[: prompt + int(ends[0]) + (answer.finish_reason != "length")]  # a reply that was cut has no end
        if len(ids) > (most := int(model.config.get_text_config().max_position_embeddings)):
            raise JudgeFailed(f"the reply ends after {len(ids):,} tokens, and the model of rewards reads {most:,}")
        with torch.inference_mode():
            score = float(model(torch.tensor(ids[None].astype(np.int64), device=model.device)).logits[0, 0])
        if not math.isfinite(score):
            raise JudgeFailed(f"the model of rewards gave {score}")
        return score, len(ids)


def _load(path: Path) -> tuple[Any, Renderer]:
    """Return the model, in float32 on the CPU, and its renderer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from palestra.models.causal_lm import load_tokenizer
    from palestra.models.quiet import quiet_transformers
    from palestra.renderers.selection import select_renderer

    try:
        with quiet_transformers():
            if (labels := AutoConfig.from_pretrained(path).num_labels) != 1:
                raise ConfigError(f"judge.path: the model in {path} has {labels} classes; a model of rewards has one")
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"judge.path: {path} is no model for the classification of sequences: {error}") from error
    if missing := sorted(loaded["missing_keys"]):  # it would have random values
        raise ConfigError(f"judge.path: {path} is no model of rewards: it has no {missing[0]}")
    model.config.get_text_config().pad_token_id = None  # the last token is read, which may be the padding token
    return model.eval(), select_renderer(load_tokenizer(str(path)))


def _digest(path: Path) -> str:
    """Return a digest of the model's weights, by which a run knows the verdicts of the same model."""
    found = hashlib.sha256()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"judge.path: {path} has no weights as safetensors")
    for file in files:
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:32]
