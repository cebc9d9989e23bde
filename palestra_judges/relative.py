"""`RelativeJudge`: ranks the episodes of a group in a drawn order and in its mirror image.

A judge prefers positions. An order and its mirror image cancel most of that (arXiv 2310.07712); two drawn orders cost
as much and do not. Equal replies are one entry, and entries have random-looking names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from palestra.envs.judge import JudgedGroup, ProbedJudge, VerdictBook
from palestra.errors import JudgeFailed
from palestra.types.records import Verdict
from palestra.waiting import together
from palestra_judges.bounds import AGREEMENT, doubts
from palestra_judges.model import JudgeModel
from palestra_judges.questions import canonical, digest, null_reply, null_verdicts, null_work, question_of, work_of
from palestra_judges.verdicts import read_ranking

if TYPE_CHECKING:
    from palestra_judges.config import Relative

TASK = "Rank the replies from best to worst: "
QUESTION = "which one serves the person who asked best?"  # without instructions of the user's
VERDICT = {
    "id": "{id}",
    "reasons": {"id of a reply": "one sentence"},
    "ranking": ["id of the best", "…", "of the worst"],
}
Entry = tuple[Any, tuple[str, ...]]  # what was done, and the episodes that have done it


class RelativeJudge(ProbedJudge):
    """Asks about whole groups."""

    whole_groups = True

    def __init__(self, config: Relative, model: JudgeModel) -> None:
        self._config, self._model = config, model
        self._instructions = TASK + (config.instructions or QUESTION)
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
        """Return the mean rank of each waiting episode, from 0 to 1; see `Judge.judge`.

        In training, the ranks of several orders are drawn towards 0.5 by what noise explains of them, and that is a
        reward of its own, of weight 0. So a group that was ranked at random has equal rewards, and teaches nothing.
        """
        asked, done = self._works(group)
        names = [one.episode.episode_id for one in group.trajectories]
        trains, name = group.kind == "train", self._config.name
        orders = self.orders(entries_of(names, done), group.seed, both=group.kind == "validation")
        given = await together(*(self._verdict(group, book, asked, n, one) for n, one in enumerate(orders)))
        means = {one: _mean([verdict.scores[one][name] for verdict in given]) for one in group.waiting}
        if not trains or len(orders) == 1:
            return {one: {name: mean} for one, mean in means.items()}
        shown = [[episodes[0] for _, episodes in order] for order in orders]
        said = [{one: verdict.scores[one][name] for one in order} for verdict, order in zip(given, shown, strict=True)]
        agreed = reliability(said)
        return {one: {name: 0.5 + agreed * (mean - 0.5), name + AGREEMENT: agreed} for one, mean in means.items()}

    async def probe(self, group: JudgedGroup, book: VerdictBook) -> list[float]:
        """Return the ranks of canned replies among those of a group, from 0 to 1; see `ProbedJudge.probe`."""
        asked, done = self._works(group)
        question = asked.get("question", done[0].get("question", ""))
        own = {key: value for key, value in done[0].items() if key in ("question", "task")}
        names = [one.episode.episode_id for one in group.trajectories]

        def ask(name: str, null: str) -> Coroutine[Any, Any, Verdict]:
            work = {**own, **null_work(null_reply(null, question), self._config.sees)}
            return self.ask(asked, self.orders(entries_of([*names, name], [*done, work]), group.seed)[0])

        found = await null_verdicts(group.key(self.rubric, self._model.version), book, ask)
        return [verdict.scores[name][self._config.name] for name, verdict in found]

    def _works(self, group: JudgedGroup) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return what was asked of a group, and what each of its episodes has done."""
        sees, keys = self._config.sees, self._config.task_keys
        works = [work_of(one, group.judged.get(one.episode.episode_id), sees, keys) for one in group.trajectories]
        asked, done = works[0][0], [work for _, work in works]
        if any(other != asked for other, _ in works):  # each entry has its own question
            asked, done = {}, [{**other, **work} for other, work in works]
        return asked, done

    def orders(self, entries: Sequence[Entry], seed: int, both: bool = False) -> list[list[Entry]]:
        """Return the orders in which entries are shown: each drawn one is followed by its mirror image, with `both`
        also where one order is configured.
        """
        draw = random.Random(digest(str(seed), *(canonical(work) for work, _ in entries)))
        found: list[list[Entry]] = []
        count = max(self._config.orders, 2 if both else 1)
        while len(found) < count:
            drawn = list(entries)
            draw.shuffle(drawn)
            found += [drawn, drawn[::-1]]
        return found[:count]

    async def _verdict(
        self, group: JudgedGroup, book: VerdictBook, asked: Mapping[str, Any], number: int, entries: Sequence[Entry]
    ) -> Verdict:
        key = group.key(self.rubric, self._model.version, number)
        if (verdict := await book.known(key)) is None:
            verdict = await self.ask(asked, entries)
            await book.record(key, verdict)
        return verdict

    async def ask(self, asked: Mapping[str, Any], entries: Sequence[Entry], repeat: int = 0) -> Verdict:
        """Return the verdict on entries in this order; one entry alone is not asked about, and has 0.5.

        Args:
            repeat: how often it was asked before.

        Raises:
            JudgeFailed: there is none.
        """
        name = self._config.name
        if len(entries) == 1:
            return Verdict(scores={one: {name: 0.5} for one in entries[0][1]}, reasons={}, calls=0)
        works = canonical({"": [work for work, _ in entries]})
        ids = [digest(works, str(place))[:6] for place in range(len(entries))]
        if len(set(ids)) < len(ids):
            raise JudgeFailed("two replies have drawn the same id")
        data = {**asked, "replies": [{"id": one, **work} for one, (work, _) in zip(ids, entries, strict=True)]}
        question = question_of(data, self._instructions, json.dumps(VERDICT, ensure_ascii=False))
        answered = await self._model.ask(question, partial(read_ranking, question_id=question.id, ids=ids), repeat)
        ranking, said = answered.value
        scores: dict[str, dict[str, float]] = {}
        reasons: dict[str, dict[str, str]] = {}
        for one, (_, episodes) in zip(ids, entries, strict=True):
            score = 1 - ranking.index(one) / (len(ids) - 1)
            scores |= {episode: {name: score} for episode in episodes}
            reasons |= {episode: {name: said[one]} for episode in episodes if one in said}
        return Verdict(
            scores=scores,
            reasons=reasons,
            calls=answered.calls,
            tokens=answered.tokens,
            seconds=answered.seconds,
        )


def entries_of(names: Sequence[str], works: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Return works as entries, equal ones as one, in an order that does not depend on their names."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for name, work in zip(names, works, strict=True):
        found.setdefault(canonical(work), (work, []))[1].append(name)
    return [(work, tuple(episodes)) for _, (work, episodes) in sorted(found.items())]


def reliability(orders: Sequence[Mapping[str, float]]) -> float:
    """Return the share of the variance of averaged ranks that noise doesn't explain, from 0 to 1.

    Hoyt 1941, "Test reliability estimated by analysis of variance", equal to Cronbach's alpha: 1 - noise / variance of
    the entries' means. Noise is what a judge's preference for early or late positions, fitted as a line, leaves of the
    differences between orders. 0: the orders agree no more than random ones, or the entries have equal means.

    Args:
        orders: at least two; of each the ranks of all entries, from 0 to 1, in the order shown, with mirror images.
    """
    number, last = len(orders), len(orders[0]) - 1
    ranks = [{name: 2 * round(rank * last) - last for name, rank in order.items()} for order in orders]  # exact, mean 0
    places = range(-last, last + 1, 2)
    between = sum(sum(order[name] for order in ranks) ** 2 for name in ranks[0]) / number
    if not between:
        return 0.0
    preference = sum(rank * place for order in ranks for rank, place in zip(order.values(), places, strict=True))
    noise = sum(rank**2 for order in ranks for rank in order.values()) - between
    noise -= preference**2 / (number * sum(place**2 for place in places))
    return max(0.0, 1.0 - noise * last / (between * max((number - 1) * last - 1, 1)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
