"""Advantages and loss weights of a group's tokens, recomputed from the store.

Neither is recorded. The learner's own code computes them from the recorded episodes, so they equal those of training if
the algorithm needs only recorded data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson
from sqlalchemy import Connection, select

from palestra.algorithms.base import Algorithm
from palestra.algorithms.registry import create_algorithm
from palestra.config import GroupConfig, JobConfig, OwnAlgorithmConfig
from palestra.dashboard.runs import DAMAGED
from palestra.database.sqlite import MOST_VALUES
from palestra.learner.batch import make_batch
from palestra.store.calls import read_trajectory
from palestra.store.run_log import read_manifest
from palestra.store.tables import OF_LAST_LEASE, chats, episodes
from palestra.tokens import token_weights
from palestra.types.calls import Floats
from palestra.types.records import BatchManifest, Trajectory

UNKNOWN_CREDIT = "a record of the step's batch can't be read, so advantages and loss weights are not known"
WHOLE_BATCH = "the loss weight depends on which calls of the whole batch are kept, so it is not shown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """What one policy learned from a group.

    Attributes:
        advantages: float32 [C] by episode and call, over the C tokens that the call sampled; NaN where no row trains
            the token. Episodes without rows are left out.
        weights: loss weight of each trained token, by episode, without importance weights. None: unknown.
        notes: why something is unknown, for people.
    """

    advantages: Mapping[str, Mapping[int, Floats]] = field(default_factory=dict)
    weights: Mapping[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def group_in_batch(connection: Connection, manifest: BatchManifest, group_index: int) -> list[Trajectory]:
    """Return the episodes of a group that are in a batch, with their calls, in canonical order."""
    of_group = select(episodes.c.episode_id).where(episodes.c.kind == "train", episodes.c.group_index == group_index)
    members = set(connection.execute(of_group).scalars())
    return [read_trajectory(connection, name) for name in manifest.episode_ids if name in members]


def batch_group(connection: Connection, manifest: BatchManifest | None, group_index: int) -> list[Trajectory] | None:
    """Return the episodes of a group that are in a batch; None: there is no batch, or an episode cannot be read."""
    try:
        return None if manifest is None else group_in_batch(connection, manifest, group_index)
    except DAMAGED:
        return None


def credits_of_group(
    connection: Connection, config: JobConfig, manifest: BatchManifest | None, group: Sequence[Trajectory] | None
) -> dict[str, Credit]:
    """Return what each trained policy learned from a group; unknown if an episode's record is damaged. `group`: its
    episodes in the batch; None: one of them cannot be read.
    """
    if manifest is None:
        return {}
    unknown = {policy: Credit(notes=(UNKNOWN_CREDIT,)) for policy in manifest.versions}
    if group is None:
        return unknown
    try:
        return {policy: group_credit(connection, config, manifest, group, policy) for policy in manifest.versions}
    except DAMAGED:
        return unknown


def readable_manifest(connection: Connection, step: int) -> BatchManifest | None:
    """Return the batch of a step; None: it is missing or damaged."""
    try:
        return read_manifest(connection, step)
    except DAMAGED:
        return None


def group_credit(
    connection: Connection, config: JobConfig, manifest: BatchManifest, group: Sequence[Trajectory], policy: str
) -> Credit:
    """Return what one policy learned from a group of a step's batch."""
    algorithm, notes = _algorithm(config, policy)
    if algorithm is None or policy not in manifest.versions or not config.updates_in(policy, manifest.step):
        return Credit(notes=notes)
    sampling = config.policies[policy].sampling
    batch = make_batch(
        group,
        algorithm,
        sampling.max_tokens,
        manifest.versions[policy],
        policy,
        config.players,
    )
    if batch.samples:
        batch = batch.with_advantages(algorithm.advantages(batch.groups, {}), {})
    prompts = {(t.episode.episode_id, chat.index): chat for t in group for chat in t.chats}
    found: dict[str, dict[int, Floats]] = {}
    for row in batch.samples:
        mine = found.setdefault(row.episode_id, {})
        for index in np.unique(row.calls[row.loss_mask]).tolist():
            chat = prompts[row.episode_id, index]
            values = mine.setdefault(index, np.full(len(chat.completion_ids), np.nan, np.float32))
            places = np.flatnonzero(row.loss_mask & (row.calls == index))
            values[places - chat.prompt_tokens] = row.advantages[places]
    names = [trajectory.episode.episode_id for trajectory in group]
    weights, unknown = _weights(connection, config, manifest, policy, sampling.max_tokens)
    return Credit(advantages=found, weights={name: weights.get(name) for name in names}, notes=(*notes, *unknown))


def _algorithm(config: JobConfig, policy: str) -> tuple[Algorithm | None, tuple[str, ...]]:
    """Return the algorithm that gives a policy's advantages, and what is unknown; None: it cannot run here."""
    notes: tuple[str, ...] = ()
    plain = config.algorithm_of(policy)
    if isinstance(plain, OwnAlgorithmConfig):
        return None, (f"advantages are made by {plain.name}, a class of its user's own, which is not run here",)
    if not isinstance(plain, GroupConfig) or getattr(plain, "advantage_scale", None) == "gdpo":
        return None, (
            f"advantages of {plain.name} depend on more than the episodes of the group, so they are not shown",
        )
    if plain.importance_sampling != "none":
        notes += ("the loss weight is that before importance_sampling, whose factor is not recorded",)
        plain = plain.model_copy(update={"importance_sampling": "none"})
    if plain.minibatches > 1:
        notes += (
            f"the loss weight is that in the whole batch; each of the {plain.minibatches} minibatches has its own",
        )
    algorithm = create_algorithm(plain, config.rollout.step_order)
    if algorithm.needs:
        needs = ", ".join(sorted(algorithm.needs))
        return None, (f"advantages of {plain.name} depend on {needs}, which are not recorded",)
    return algorithm, notes


def _weights(
    connection: Connection, config: JobConfig, manifest: BatchManifest, policy: str, max_tokens: int
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the loss weight of a trained token of each episode of the batch, and why they are not known."""
    algorithm = config.algorithm_of(policy)
    if algorithm.train_on != "all-calls":
        return {}, (WHOLE_BATCH,)
    tokens = dict.fromkeys(manifest.episode_ids, 0)
    for start in range(0, len(manifest.episode_ids), MOST_VALUES):
        wanted = (
            select(chats.c.episode_id, chats.c.versions)
            .join(episodes, OF_LAST_LEASE)
            .where(chats.c.episode_id.in_(manifest.episode_ids[start : start + MOST_VALUES]))
            .where(chats.c.policy == policy)
        )
        for name, versions in connection.execute(wanted):
            tokens[name] += sum(count for _, _, count in orjson.loads(versions))
    return dict(zip(tokens, token_weights(list(tokens.values()), algorithm.loss_agg_mode, max_tokens), strict=True)), ()
