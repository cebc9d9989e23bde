"""`RewardModelJudge`: the reward of an episode is what a trained reward model gives its last reply."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.envs.judge import JudgedGroup, VerdictBook
from palestra.errors import ConfigError, JudgeFailed
from palestra.types.records import Verdict

if TYPE_CHECKING:
    from palestra_judges.config import RewardModel
    from palestra_judges.reader import RewardModelReader

RUBRIC = "reward model"  # what is asked, in the key of a verdict


class RewardModelJudge:
    """Scores one episode at a time, in a thread, by transformers' model for the classification of sequences."""

    whole_groups = False

    def __init__(self, config: RewardModel) -> None:
        self._config = config
        self._lock = asyncio.Lock()  # one reply at a time has all cores
        self._model: RewardModelReader | None = None
        self._version = ""

    async def open(self) -> list[str]:
        """Load the model; see `Judge.open`."""
        self._version = await asyncio.to_thread(_digest, self._config.path)
        from palestra_judges.reader import RewardModelReader  # with torch

        self._model = await asyncio.to_thread(RewardModelReader, self._config.path)
        return []

    async def close(self) -> None:
        """Let go of the model."""
        self._model = None

    async def judge(self, group: JudgedGroup, book: VerdictBook) -> Mapping[str, Mapping[str, float]]:
        """Return the model's reward of the last reply; see `Judge.judge`."""
        (trajectory,) = group.trajectories
        name, agent = trajectory.episode.episode_id, group.judged.get(trajectory.episode.episode_id)
        key = group.key(RUBRIC, self._version)
        if (verdict := await book.known(key)) is None:
            answer = next((chat for chat in reversed(trajectory.chats) if agent in (None, chat.agent)), None)
            if answer is None:
                raise JudgeFailed("nothing was said that a reward model could read")
            started = time.monotonic()
            assert self._model is not None, "opened before"
            async with self._lock:
                score, tokens = await asyncio.to_thread(self._model.score, answer)
            verdict = Verdict(
                scores={name: {self._config.name: score}},
                reasons={},
                tokens=tokens,
                seconds=time.monotonic() - started,
            )
            await book.record(key, verdict)
        return verdict.scores


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
