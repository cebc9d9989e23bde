"""`check_algorithm`: tests an algorithm and its loss before training, and explains mistakes.

The episodes are made up. Every sampled token has a unique id, so that each token's gradient is known however rows are
ordered and split, and different representations of the same episodes can be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from palestra.algorithms.base import Algorithm, ForwardOutputs, Group
from palestra.algorithms.loss import Loss, LossInputs
from palestra.algorithms.losses import build_loss
from palestra.config import OwnAlgorithmConfig
from palestra.errors import InvalidAlgorithm
from palestra.learner.batch import Batch, check_advantages
from palestra.tokens import token_weights
from palestra.types.calls import Chat, Floats, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import text_message
from palestra.types.records import EpisodeRecord, Task, TimeStep, TrainSample, Trajectory
from palestra.types.states import EpisodeState

GROUPS = ((1.0, 0.0, 0.25), (0.0, 2.0), (0.5, -0.5, 0.5, 0.0))
"""The rewards of the episodes of each group."""
_SAMPLED = 6  # tokens that each episode samples; divisible by every number of calls
_PROMPT_ID, _PADDING_ID, _FIRST_ID = 1, 2, 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """How made-up episodes are written down.

    Attributes:
        prompt: tokens before the first sampled one.
        pad: tokens at the end of each row that were not sampled.
        beside: logprob that stands in a row where a token was not sampled.
        calls: calls of each episode, all in one TimeStep, each of which continues the one before.
        rows: rows of each episode, between which the calls are shared out.
        alike: every episode is cut so; else the first of each group is, and the others have one call and one row.
        reverse: put the rows of each group in the opposite order.
    """

    prompt: int = 4
    pad: int = 0
    beside: float = float("nan")
    calls: int = 1
    rows: int = 1
    alike: bool = True
    reverse: bool = False


def made_up_groups(rewards: Sequence[Sequence[float]] = GROUPS, size: int | None = None, **cut: Any) -> list[Group]:
    """Return groups of episodes whose sampled tokens have ids from 1000 on, each its own. `size` takes only the first
    episodes of each group; `cut` are fields of `_Cut`.
    """
    how = _Cut(**cut)
    rewards = [group[:size] for group in rewards]
    lengths = [
        _SAMPLED + (number + place) % 2 * _SAMPLED
        for number, group in enumerate(rewards)
        for place in range(len(group))
    ]
    weights = iter(token_weights(lengths, "seq-mean-token-mean", 64))
    found, first = [], _FIRST_ID
    for number, group in enumerate(rewards):
        episodes, of_group = [], []
        for place, reward in enumerate(group):
            length = _SAMPLED + (number + place) % 2 * _SAMPLED
            name = f"train-{number:06d}-{place:02d}"
            ids = np.arange(first, first + length, dtype=np.int32)
            first += length
            own = how if how.alike or place == 0 else replace(how, calls=1, rows=1)
            episodes.append(_trajectory(name, number, place, reward, _chats(name, ids, own.prompt, own.calls)))
            of_group += _made_up_rows(name, ids, own, next(weights))
        found.append(Group(trajectories=tuple(episodes), rows=tuple(of_group[::-1] if how.reverse else of_group)))
    return found


def of_token(row: TrainSample, name: str) -> Floats:
    """Return a number for each sampled token that depends only on its id and `name`, float32 [N]; else NaN. Numbers of
    different names, such as `old_logprobs`, differ by a few hundredths.
    """
    near = _logprobs(row.ids) + 0.1 * np.sin(row.ids * (1.0 + len(name)))
    return np.where(row.loss_mask, near, np.nan).astype(np.float32)


def _logprobs(ids: np.ndarray) -> np.ndarray:
    """Return the logprob at sampling of each of N tokens, [N], between -2.5 and -0.5."""
    return -1.5 + np.cos(ids * 1.7)


def _chats(name: str, ids: np.ndarray, prompt: int, calls: int) -> tuple[Chat, ...]:
    """Return the calls of an episode, with its sampled tokens divided among them."""
    found: list[Chat] = []
    for index, part in enumerate(np.array_split(ids, calls)):
        parent = found[-1] if found else None
        found.append(
            Chat(
                episode_id=name,
                fence=1,
                index=index,
                time_step=0,
                agent="agent",
                policy="policy",
                parent=parent,
                shared=0 if parent is None else parent.tokens,
                shared_messages=0 if parent is None else len(parent.messages) + 1,
                new_messages=(text_message("user", "hello"),),
                prompt_tail=np.full(prompt if parent is None else 0, _PROMPT_ID, np.int32),
                reply=text_message("assistant", "reply"),
                completion_ids=part,
                logprobs=_logprobs(part).astype(np.float32),
                versions=(VersionSpan(PolicyVersion(0, 0), len(part)),),
                finish_reason="stop",
                sampling=SamplingParams(temperature=1.0, max_tokens=64, seed=index),
                request_digest=f"{name} {index}",
                started_at=0.0,
                finished_at=1.0,
            )
        )
    return tuple(found)


def _trajectory(name: str, number: int, place: int, reward: float, chats: tuple[Chat, ...]) -> Trajectory:
    episode = EpisodeRecord(
        episode_id=name,
        kind="train",
        group_index=number,
        sample_index=place,
        task=Task(task_id=str(number), data={}),
        state=EpisodeState.COMPLETED,
        fence=1,
        attempts=1,
        rewards={"agent": reward},
        step_rewards=None,
        step_times=None,
        metadata={},
        worker_id=None,
        lease_seconds=60.0,
    )
    step = TimeStep(index=0, chats=chats, reward=None, observed_at=0.0, acted_at=1.0, terminated=True, truncated=False)
    return Trajectory(episode=episode, steps=(step,))


def _made_up_rows(name: str, ids: np.ndarray, cut: _Cut, weight: float) -> list[TrainSample]:
    """Return the rows of an episode, each of which trains the tokens of some of its calls."""
    row = np.concatenate([np.full(cut.prompt, _PROMPT_ID), ids, np.full(cut.pad, _PADDING_ID)]).astype(np.int32)
    of_call = np.full(len(row), -1, np.int32)
    of_call[cut.prompt : cut.prompt + len(ids)] = np.concatenate(
        [np.full(len(part), index) for index, part in enumerate(np.array_split(ids, cut.calls))]
    )
    found = []
    for chosen in np.array_split(np.arange(cut.calls), cut.rows):
        mask = np.isin(of_call, chosen)
        found.append(
            TrainSample(
                episode_id=name,
                policy="policy",
                ids=row,
                loss_mask=mask,
                logprobs=np.where(mask, _logprobs(row), cut.beside).astype(np.float32),
                versions=np.where(mask[:, None], 0, -1).astype(np.int32).repeat(2, axis=1),
                calls=np.where(mask, of_call, -1).astype(np.int32),
                advantages=np.zeros(len(row), np.float32),
                loss_weights=mask * np.float32(weight),
                temperatures=np.ones(len(row), np.float32),
            )
        )
    return found


Gradients = Mapping[int, float]
"""The gradient of the whole loss by the logprob of each trained token, by the token's id."""
TOLERANCE = 1e-5  # of the largest gradient: float32, added up in another order


def check_algorithm(
    algorithm: type[Algorithm] | Callable[[], Algorithm],
    settings: Mapping[str, bool | int | float | str] | None = None,
) -> None:
    """Try an algorithm and its loss on made-up episodes, and raise the first mistake found.

    These are mistakes:

    - the class is not a subclass of `palestra.Algorithm`; an error in `advantages`, `loss` or the loss is raised;
    - advantages or importance weights have other shapes than the rows, or are not finite for a trained token, even
      if all rewards of a group, or of the batch, are equal, with and without a penalty that trains such groups;
    - the loss is not a number, or is not one number for each token;
    - a metric is not declared;
    - tokens that were not sampled have an effect: the prompt, padding at the end of a row, or the values of a row's
      columns at these tokens, which are NaN;
    - the result depends on how an episode is split into calls and rows, or on the order of the rows of a group;
    - the loss of a batch is not the sum of the losses of its parts: a loss that divides by the number of its tokens
      would depend on micro-batches;
    - the state is not JSON, or an algorithm restored from it gives other advantages.

    An algorithm that trains `every_choice` is refused, because the made-up episodes have no choices.

    Args:
        algorithm: the class; or a factory, for one that takes other arguments.
        settings: available as `self.config.settings`, as from `[algorithm.settings]`. None: none.

    Raises:
        InvalidAlgorithm: the message names the rule and the mistake.
    """
    make = partial(_of_class, algorithm, dict(settings or {})) if isinstance(algorithm, type) else algorithm
    _check_type(make())
    if make().every_choice:
        raise InvalidAlgorithm(
            "the algorithm trains every choice of a call, and the made-up episodes have replies without choices, so it "
            "can't be tried here"
        )
    recorded = make().recorded
    groups_of = partial(made_up_groups, size=2 if recorded is not None and recorded.pairs else None)
    plain = groups_of()
    wanted = token_gradients(make(), plain)
    for rewards, title in ((EQUAL_IN_GROUPS, "of each group"), (EQUAL, "of the batch")):
        where = f"where all rewards {title} are equal"
        token_gradients(make(), groups_of(rewards=rewards), where)
        # A penalty or a bonus in the loss trains such groups as well, so that they have rows.
        token_gradients(make(), groups_of(rewards=rewards), f"{where} and a penalty trains them", True)
    for title, groups in _same_episodes(groups_of):
        _compare(token_gradients(make(), groups), wanted, title)
    _check_parts(make(), plain)
    _check_state(make, plain)


EQUAL_IN_GROUPS = tuple((float(number),) * len(group) for number, group in enumerate(GROUPS))
EQUAL = tuple((1.0,) * len(group) for group in GROUPS)


def _same_episodes(groups_of: Callable[..., list[Group]]) -> list[tuple[str, list[Group]]]:
    """Return the made-up episodes in other representations that must be equivalent, each with its difference."""
    return [
        ("tokens that were not sampled matter: other prompts change the gradient", groups_of(prompt=9)),
        (
            "padding matters: tokens at the end of a row that were not sampled change the gradient",
            groups_of(pad=5),
        ),
        ("numbers of tokens that were not sampled matter: they are read", groups_of(beside=-7.0)),
        ("it matters how an episode is cut into calls", groups_of(calls=3)),
        ("it matters how an episode is cut into rows", groups_of(calls=2, rows=2)),
        (
            "it matters how an episode is cut into calls and rows, where others are cut otherwise: an episode counts "
            "as often as it has calls or rows (take each episode of `group.trajectories` once)",
            groups_of(calls=2, rows=2, alike=False),
        ),
        ("the order of the rows of a group matters", groups_of(calls=2, rows=2, reverse=True)),
    ]


def _of_class(algorithm: type[Algorithm], settings: dict[str, bool | int | float | str]) -> Algorithm:
    """Return an algorithm as a job makes it of a user's class."""
    _check_subclass(algorithm)
    return algorithm(OwnAlgorithmConfig(name="own:Algorithm", settings=settings))


def _check_subclass(found: type) -> None:
    if not issubclass(found, Algorithm):
        raise InvalidAlgorithm(f"{found.__name__} is no subclass of palestra.Algorithm")


def _check_type(algorithm: object) -> None:
    _check_subclass(type(algorithm))


def token_gradients(algorithm: Algorithm, groups: Sequence[Group], where: str = "", penalty: bool = False) -> Gradients:
    """Return the gradient of each trained token, by its id, and check everything that one batch allows.

    `where` describes the episodes, for messages. `penalty`: groups without a learning signal also have rows, as with a
    job's penalty or bonus.
    """
    rows, loss = _rows(algorithm, groups, where, penalty), _loss(algorithm)
    return _of_rows(loss, rows, rows, where)


def _rows(algorithm: Algorithm, groups: Sequence[Group], where: str, penalty: bool = False) -> list[TrainSample]:
    """Return the rows with advantages, as a learner creates them; arguments as in `token_gradients`."""
    groups = [
        group if algorithm.learns_from(group.trajectories) or penalty else replace(group, rows=()) for group in groups
    ]
    rows = [row for group in groups for row in group.rows]
    forward: ForwardOutputs = {name: [of_token(row, name) for row in rows] for name in algorithm.needs}
    found = algorithm.advantages(groups, forward)
    check_advantages(found, rows)
    if undeclared := found.metrics.keys() - {metric.name for metric in algorithm.metrics}:
        raise InvalidAlgorithm(f"the metrics {sorted(undeclared)} are not declared in `metrics` of the algorithm")
    batch = Batch(groups=list(groups), tokens=[], staleness={}, metrics={}).with_advantages(found, forward)
    for row in batch.samples:
        for name, column in (("advantage", row.advantages), ("importance weight", row.loss_weights)):
            if not np.isfinite(column[row.loss_mask]).all():
                raise InvalidAlgorithm(
                    f"the {name} of a token of episode {row.episode_id} is not finite{_after(where)}"
                )
    return batch.samples


def _loss(algorithm: Algorithm) -> Loss:
    found = build_loss(algorithm.loss())
    if not isinstance(found, Loss):
        raise InvalidAlgorithm(f"the loss {found.name!r} is of a critic's values, and `loss` names one of tokens")
    return found


def _of_rows(
    loss: Loss, rows: Sequence[TrainSample], batch: Sequence[TrainSample], where: str = ""
) -> dict[int, float]:
    """Return the gradient of each token of some rows of a batch."""
    import torch

    if not rows:
        return {}
    ids = np.concatenate([row.ids[row.loss_mask] for row in rows])
    inputs = _inputs(rows)
    if loss.over_sequences:
        inputs = replace(inputs, sequence_means=_sequence_means(loss, rows, batch))
    output = loss(inputs)
    if output.loss.shape != inputs.logprobs.shape:
        raise InvalidAlgorithm(
            f"the loss {loss.name!r} returns {list(output.loss.shape)} numbers for {len(ids)} tokens; it returns one "
            "for each token"
        )
    if undeclared := output.metrics.keys() - {metric.name for metric in loss.metrics}:
        raise InvalidAlgorithm(
            f"the loss {loss.name!r} reports {sorted(undeclared)}, which its `metrics` do not declare"
        )
    weights = torch.from_numpy(np.concatenate([row.loss_weights[row.loss_mask] for row in rows]))
    total = (output.loss * weights).sum()
    gradient = np.zeros(len(ids), np.float32)
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
        assert inputs.logprobs.grad is not None
        gradient = inputs.logprobs.grad.numpy()
    if not (math.isfinite(float(total.detach())) and np.isfinite(gradient).all()):
        raise InvalidAlgorithm(f"the loss {loss.name!r} or its gradient is not finite{_after(where)}")
    return {int(token): float(value) for token, value in zip(ids, gradient, strict=True)}


def _inputs(rows: Sequence[TrainSample]) -> LossInputs:
    """Return the inputs of a loss for the trained tokens of rows, of a policy that has moved a little."""
    import torch

    def column(values: Sequence[Any]) -> Any:
        return torch.from_numpy(
            np.concatenate([np.asarray(v)[row.loss_mask] for v, row in zip(values, rows, strict=True)])
        )

    old = [row.old_logprobs for row in rows if row.old_logprobs is not None]
    reference = [row.reference_logprobs for row in rows if row.reference_logprobs is not None]
    return LossInputs(
        logprobs=column([of_token(row, "logprobs") for row in rows]).requires_grad_(True),
        sampling_logprobs=column([row.logprobs for row in rows]),
        old_logprobs=column(old) if old else None,
        reference_logprobs=column(reference) if reference else None,
        advantages=column([row.advantages for row in rows]),
        on_policy=column([np.ones(len(row.ids), np.bool_) for row in rows]),
    )


def _sequence_means(loss: Loss, rows: Sequence[TrainSample], batch: Sequence[TrainSample]) -> Any:
    """Return for each trained token of `rows` the mean over its episode in the whole batch, as a trainer does."""
    import torch

    values = loss.of_sequence(_inputs(batch)).detach()
    names = [row.episode_id for row in batch for _ in range(int(row.loss_mask.sum()))]
    means = {
        name: values[[place for place, other in enumerate(names) if other == name]].mean()
        for name in dict.fromkeys(names)
    }
    return torch.stack([means[row.episode_id] for row in rows for _ in range(int(row.loss_mask.sum()))])


def _compare(found: Gradients, wanted: Gradients, title: str) -> None:
    """Raise unless both gradients are equal."""
    largest = max((abs(value) for value in wanted.values()), default=0.0)
    for token in sorted(found.keys() | wanted.keys()):
        a, b = found.get(token, 0.0), wanted.get(token, 0.0)
        if abs(a - b) > TOLERANCE * max(largest, 1e-12):
            raise InvalidAlgorithm(f"{title}; that of a token was {b:.6g}, and became {a:.6g}")


def _check_parts(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    """Raise unless the loss of a batch is the sum of the losses of its parts."""
    rows, loss = _rows(algorithm, groups, ""), _loss(algorithm)
    parts = _of_rows(loss, rows[::2], rows) | _of_rows(loss, rows[1::2], rows)
    _compare(
        parts,
        _of_rows(loss, rows, rows),
        f"the loss {loss.name!r} of a batch is not the sum of the losses of its parts, so that it depends on "
        "micro-batches (a loss returns one number for each token, and does not divide by their number)",
    )


def _check_state(make: Callable[[], Algorithm], plain: list[Group]) -> None:
    """Raise unless an algorithm continues from a checkpoint as if it had not stopped."""
    first, second = make(), make()
    token_gradients(first, plain)
    try:
        saved = json.loads(json.dumps(first.state(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidAlgorithm(f"state() is not JSON: {error}") from error
    second.restore(saved)
    _compare(
        token_gradients(second, plain),
        token_gradients(first, plain),
        "an algorithm that has taken over a checkpoint's state gives another gradient than one that has not stopped",
    )


def _after(where: str) -> str:
    return f" {where}" if where else ""
