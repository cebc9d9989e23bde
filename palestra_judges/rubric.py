"""`RubricJudge`: each criterion of a rubric is a question about one episode, and a named reward."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from palestra.envs.judge import JudgedGroup, ProbedJudge, VerdictBook, weighted_share
from palestra.types.records import Verdict
from palestra_judges.bounds import doubts
from palestra_judges.model import JudgeModel
from palestra_judges.questions import digest, null_reply, null_verdicts, null_work, question_of, work_of
from palestra_judges.verdicts import read_choices

if TYPE_CHECKING:
    from palestra_judges.config import Criterion, Rubric

TASK = "Judge the reply by each of these criteria, in this order:\n"
VERDICT = {"id": "{id}", "criteria": [{"name": "…", "reason": "one sentence, before you choose", "choice": "…"}]}


class RubricJudge(ProbedJudge):
    """Asks about one episode at a time."""

    whole_groups = False

    def __init__(self, config: Rubric, model: JudgeModel) -> None:
        self._config, self._model = config, model
        self._instructions = instructions_of(config, config.criteria)
        self._choices = {one.name: one.choices for one in config.criteria}
        self.rubric = digest(self._instructions, config.sees, *config.task_keys)[:32]

    async def open(self) -> list[str]:
        """Prepare to ask; see `Judge.open`."""
        await self._model.open()
        return doubts(self._config.checked, self.rubric, self._model.version)

    @property
    def version(self) -> str:
        """Return who is asked."""
        return self._model.version

    async def close(self) -> None:
        """Close the connections."""
        await self._model.close()

    async def judge(self, group: JudgedGroup, book: VerdictBook) -> Mapping[str, Mapping[str, float]]:
        """Return a reward for each criterion; see `Judge.judge`."""
        (trajectory,) = group.trajectories
        key = group.key(self.rubric, self._model.version)
        if (verdict := await book.known(key)) is None:
            name = trajectory.episode.episode_id
            asked, done = work_of(trajectory, group.judged.get(name), self._config.sees, self._config.task_keys)
            verdict = await self.ask({**asked, **done}, name)
            await book.record(key, verdict)
        return verdict.scores

    async def probe(self, group: JudgedGroup, book: VerdictBook) -> list[float]:
        """Return the shares of the largest reward that canned replies get; see `ProbedJudge.probe`."""
        first, sees = group.trajectories[0], self._config.sees
        asked, _ = work_of(first, group.judged.get(first.episode.episode_id), sees, self._config.task_keys)

        def ask(name: str, null: str) -> Coroutine[Any, Any, Verdict]:
            return self.ask({**asked, **null_work(null_reply(null, asked.get("question", "")), sees)}, name)

        found = await null_verdicts(group.key(self.rubric, self._model.version), book, ask)
        return [weighted_share(verdict.scores[name], self._config.reward_weights) for name, verdict in found]

    async def ask(self, data: Mapping[str, Any], name: str, repeat: int = 0, mirrored: bool = False) -> Verdict:
        """Return the verdict on one work.

        Args:
            name: of the work, in the verdict.
            repeat: how often it was asked before.
            mirrored: whether the criteria are shown in reverse.

        Raises:
            JudgeFailed: there is none.
        """
        config = self._config
        instructions = instructions_of(config, config.criteria[::-1]) if mirrored else self._instructions
        question = question_of(data, instructions, json.dumps(VERDICT, ensure_ascii=False))
        read = partial(read_choices, question_id=question.id, choices=self._choices)
        answered = await self._model.ask(question, read, repeat)
        return Verdict(
            scores={name: {one: score for one, (score, _) in answered.value.items()}},
            reasons={name: {one: reason for one, (_, reason) in answered.value.items() if reason}},
            calls=answered.calls,
            tokens=answered.tokens,
            seconds=answered.seconds,
        )


def instructions_of(config: Rubric, criteria: Sequence[Criterion]) -> str:
    """Return what the judge has to do, with the criteria in this order."""
    asked = [{"name": one.name, "criterion": one.text, "choices (worst to best)": one.choices} for one in criteria]
    parts = [config.instructions, TASK + json.dumps(asked, indent=1, ensure_ascii=False)]
    return "\n\n".join(filter(None, parts))
