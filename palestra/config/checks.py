"""What parts of a job need of one another, checked before it starts: trained policies, devices, shared bases."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from palestra.config.engine import default_engine

if TYPE_CHECKING:
    from palestra.config.job import JobConfig


def check_devices(config: JobConfig) -> None:
    """Raise ValueError for a training job that a sharded trainer cannot train, naming the key."""
    trainer = config.trainer
    if trainer.cpu_offload and (trainer.devices == 1 or trainer.device == "cpu"):
        raise ValueError("trainer.cpu_offload is for several CUDA devices; leave it out, or set trainer.devices")
    if trainer.devices == 1:
        return
    if not config.engine.has_model:
        raise ValueError(
            f"trainer.devices is {trainer.devices}, and engine.kind = {config.engine.kind!r} trains no model; leave "
            "trainer.devices out"
        )
    for name in config.trained_policies:
        algorithm = config.algorithm_of(name)
        if hasattr(algorithm, "critic"):
            raise ValueError(
                f"trainer.devices is {trainer.devices}, and {config.algorithm_key(name)}.name = {algorithm.name!r} has "
                "a critic, which is trained on one device; take an algorithm without one, or leave trainer.devices out"
            )


PLACED = "shared"  # a service chooses the base server
_SCHEMES = ("unix:", "ws://", "wss://")


def check_address(base: str) -> str:
    """Raise ValueError unless a text is `shared` or the address of a base server."""
    if base != PLACED and not base.startswith(_SCHEMES):
        raise ValueError(f"it is {PLACED!r}, or an address that begins with {', '.join(_SCHEMES)}, and not {base!r}")
    return base


def check_bases(config: JobConfig) -> None:
    """Raise ValueError for a job that is only partly on a base server, or sets what the server has
    set, naming the key.
    """
    bases = {name: policy.base for name, policy in config.policies.items()}
    if not any(bases.values()):
        return
    first = next(name for name, base in bases.items() if base)
    for name, base in bases.items():
        if base != bases[first]:
            raise ValueError(
                f"policies.{first}.base is {bases[first]!r} and policies.{name}.base is {base!r}: all policies of a "
                "job are on the same base server, or none is"
            )
        if config.kind == "training" and not config.policies[name].frozen and config.policies[name].adapter is None:
            raise ValueError(
                f"policies.{name} is on a shared base, whose weights never change; give it an adapter, or frozen = true"
            )
    for key, given, default in (
        ("engine", config.engine, default_engine()),
        ("trainer", config.trainer, type(config.trainer)()),
    ):
        if given != default and config.engine.has_model:
            kept = default.model_dump()
            changed = next(name for name, value in given.model_dump().items() if value != kept.get(name))
            raise ValueError(
                f"{key}.{changed} is set, and the policies are on a base server, which has its own; leave out {key}"
            )


_LIKE_CHECKPOINT = re.compile(r"step-\d+")


def check_trained(config: JobConfig) -> None:
    """Raise ValueError for a training job whose policies cannot be trained, naming the key."""
    names = config.trained_policies
    if not names:
        raise ValueError(
            "all policies are frozen, and a training job trains at least one of them: leave out its `frozen`"
        )
    if len(names) > 1:
        _check_several(config)
    for name in names:
        _check_updates(config, name)
        _check_groups(config, name)
        _check_teacher(config, name)


def _check_several(config: JobConfig) -> None:
    """Raise an error for settings that are meaningless or would collide on disk with several trained policies."""
    names = config.trained_policies
    folders: dict[str, str] = {}
    for name in names:
        # Each has a folder of checkpoints, beside which there may be those of a run that has trained one policy.
        if _LIKE_CHECKPOINT.fullmatch(name):
            raise ValueError(
                f"policies.{name} has the name of a checkpoint, and several policies are trained; rename it"
            )
        other = folders.setdefault(name.casefold(), name)
        if other != name:
            raise ValueError(
                f"policies.{other} and policies.{name} differ in case only, and their checkpoints would share a folder "
                "on some disks; rename one of them"
            )
        key, algorithm = config.algorithm_key(name), config.algorithm_of(name)
        if algorithm.brings_tasks or algorithm.learns_conversations:
            raise ValueError(
                f"{key}.name is {algorithm.name!r}, which trains recorded episodes, and these do not say which of "
                f"{' and '.join(map(repr, names))} has played what; train one policy a job with it"
            )
        if getattr(algorithm, "advantage_scale", None) == "gdpo":
            raise ValueError(
                f"{key}.advantage_scale is 'gdpo', which normalises rewards by name; they are of a whole episode, and "
                f"it is not known which of {' and '.join(map(repr, names))} has earned them"
            )
        if name != names[0] and name not in config.players.named.values():
            raise ValueError(
                f"policies.{name} is trained and plays no agent, so that it would have no rewards: give it a role "
                f"(roles.AGENT = {name!r}), or set policies.{name}.frozen = true"
            )
        if name != names[0] and name not in config.players.newest.values():
            raise ValueError(
                f"policies.{name} is trained and played by its past versions only, from which nothing is learned; give "
                "it a role without a pool, or set pool.latest_share above 0"
            )


def _check_updates(config: JobConfig, name: str) -> None:
    if not config.updates_until(name, config.steps):
        every = config.policies[name].updates.every_steps
        raise ValueError(
            f"policies.{name}.updates.every_steps is {every}, and the job has {config.steps} steps, so that the "
            "policy would never be updated"
        )


def _check_groups(config: JobConfig, name: str) -> None:
    """Refuse groups that are too small to be compared, or too few to be shared out."""
    key, algorithm, rollout = config.algorithm_key(name), config.algorithm_of(name), config.rollout
    size, needed = rollout.group_size, algorithm.smallest_group
    if size < needed:
        raise ValueError(
            f"rollout.group_size is {size}, and {key}.name = {algorithm.name!r} compares the episodes of "
            f"a group with one another, so it needs at least {needed}; more learn faster (8 is the default)"
        )
    parts, groups = algorithm.minibatches, rollout.groups_per_step
    if parts > groups:
        raise ValueError(
            f"{key}.minibatches is {parts}, and rollout.groups_per_step is {groups}: a part has a whole group"
        )


def _check_teacher(config: JobConfig, name: str) -> None:
    """Raise an error for a teacher that is not frozen, or a served one that breaks a promise of the job."""
    key, algorithm = config.algorithm_key(name), config.algorithm_of(name)
    config.teacher_of(name)
    if algorithm.served_teacher is None:
        return
    if config.deterministic:
        raise ValueError(f"deterministic = true is no promise that the server of {key}.teacher_server keeps")
    temperature = config.policies[name].sampling.temperature
    if temperature != 1.0:
        raise ValueError(
            f"policies.{name}.sampling.temperature is {temperature:g}, and the "
            f"probabilities of {key}.teacher_server are those of temperature 1"
        )
