"""`check_algorithm`: tests an algorithm and its loss before training, and explains mistakes.

The episodes are made up. Every sampled token has a unique id, so that each token's gradient is known however rows are
ordered and split, and different representations of the same episodes can be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from palestra.algorithms.base import Algorithm, ForwardOutputs, Group
from palestra.algorithms.loss import Loss, LossInputs
from palestra.algorithms.losses import build_loss
from palestra.config import OwnAlgorithmConfig
from palestra.errors import InvalidAlgorithm
from palestra.learner.batch import Batch, check_advantages
from palestra.learner.made_up import GROUPS, made_up_groups, of_token
from palestra.types.records import TrainSample

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
    plain = made_up_groups()
    wanted = token_gradients(make(), plain)
    for rewards, title in ((EQUAL_IN_GROUPS, "of each group"), (EQUAL, "of the batch")):
        where = f"where all rewards {title} are equal"
        token_gradients(make(), made_up_groups(rewards=rewards), where)
        # A penalty or a bonus in the loss trains such groups as well, so that they have rows.
        token_gradients(make(), made_up_groups(rewards=rewards), f"{where} and a penalty trains them", True)
    for title, groups in _same_episodes():
        _compare(token_gradients(make(), groups), wanted, title)
    _check_parts(make(), plain)
    _check_state(make)


EQUAL_IN_GROUPS = tuple((float(number),) * len(group) for number, group in enumerate(GROUPS))
EQUAL = tuple((1.0,) * len(group) for group in GROUPS)


def _same_episodes() -> list[tuple[str, list[Group]]]:
    """Return the made-up episodes in other representations that must be equivalent, each with its difference."""
    return [
        ("tokens that were not sampled matter: other prompts change the gradient", made_up_groups(prompt=9)),
        (
            "padding matters: tokens at the end of a row that were not sampled change the gradient",
            made_up_groups(pad=5),
        ),
        ("numbers of tokens that were not sampled matter: they are read", made_up_groups(beside=-7.0)),
        ("it matters how an episode is cut into calls", made_up_groups(calls=3)),
        ("it matters how an episode is cut into rows", made_up_groups(calls=2, rows=2)),
        (
            "it matters how an episode is cut into calls and rows, where others are cut otherwise: an episode counts "
            "as often as it has calls or rows (take each episode of `group.trajectories` once)",
            made_up_groups(calls=2, rows=2, alike=False),
        ),
        ("the order of the rows of a group matters", made_up_groups(calls=2, rows=2, reverse=True)),
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

    Args:
        where: describes the episodes, for messages.
        penalty: whether a job has a penalty or a bonus, so that groups without a learning signal also have rows.
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
    """Return the loss that an algorithm names."""
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


def _check_state(make: Callable[[], Algorithm]) -> None:
    """Raise unless an algorithm continues from a checkpoint as if it had not stopped."""
    first, second = make(), make()
    token_gradients(first, made_up_groups())
    try:
        saved = json.loads(json.dumps(first.state(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidAlgorithm(f"state() is not JSON: {error}") from error
    second.restore(saved)
    _compare(
        token_gradients(second, made_up_groups()),
        token_gradients(first, made_up_groups()),
        "an algorithm that has taken over a checkpoint's state gives another gradient than one that has not stopped",
    )


def _after(where: str) -> str:
    return f" {where}" if where else ""
