"""Checks the trainer, engine and roles of a job before anything is loaded or started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import orjson

from palestra.config import JobConfig, past_name
from palestra.engine.driver import Computes, driver_of
from palestra.errors import ConfigError
from palestra.models.device import (
    DeviceName,
    available_cores,
    check_offload,
    device_of,
    make_deterministic,
    precision_of,
)
from palestra.models.numerics import KERNELS, PROBLEM, check_numerics, differences, numerics
from palestra.runtime.terms import JobPlaces
from palestra.store import RunLog
from palestra.store.run_log import NUMERICS


def check_trainer(config: JobConfig, places: JobPlaces) -> None:
    """Raise ConfigError if this machine has no device for the trainer. `places`: where its processes run; ranks with
    bundles of their own check their machines themselves.
    """
    if config.kind != "training" or not config.loads_models or places.trainer is not None:
        return
    device = device_of(config.trainer.device, "trainer.device")
    check_offload(config.trainer, device)


def check_reproducible(config: JobConfig, places: JobPlaces) -> None:
    """Raise ConfigError for a deterministic job that would compute on a GPU, whose bits differ from run to run.
    `places`: where its processes run; those with bundles of their own may be on other machines.
    """
    if not (config.deterministic and config.loads_models):
        return
    for key, device in devices(config).items():
        elsewhere = places.trainer if key == "trainer.device" else places.engine
        if elsewhere is None and device_of(device, key).type == "cuda":
            raise ConfigError(not_reproducible(key))


def not_reproducible(key: str) -> str:
    """Return the error text for a deterministic job that would compute on a GPU."""
    return (
        "deterministic = true is only kept on a CPU, and this machine would use its GPU; "
        f"set {key} = 'cpu', or deterministic = false"
    )


def devices(config: JobConfig) -> dict[str, DeviceName]:
    """Return the devices of a job's models, by key, except for other projects' servers."""
    found = {key: driver_of(table).computes(table) for key, table in config.engine.keyed_tables.items()}
    devices = {f"{key}.device": computes.device for key, computes in found.items() if computes is not None}
    return devices | ({"trainer.device": config.trainer.device} if config.kind == "training" else {})


def check_models(config: JobConfig) -> None:
    """Raise ConfigError for models that the engine would refuse after minutes, and for missing packages."""
    for table in config.engine.tables:
        for key, text in driver_of(table).check_models(config, table):
            raise ConfigError(f"{key}: {text}")


def agents_of(environment: object) -> tuple[str, ...]:
    """Return the names of an environment's agents; (): unknown before an episode. `environment`: an environment, its
    class, or a factory, which is called if necessary.
    """
    found = getattr(environment, "roles", ())
    if callable(environment) and not (isinstance(found, tuple | list) and found):
        with contextlib.suppress(Exception):  # the first episode says what is wrong with the user's code
            found = getattr(environment(), "roles", ())
    return tuple(found) if isinstance(found, tuple | list) else ()


def impossible_roles(config: JobConfig, agents: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each external player or role that the environment lacks, and each policy without a
    learning signal. `agents`: (): unknown before an episode.
    """
    if config.kind != "training" or not agents:
        return
    named = ", ".join(map(repr, agents))
    for seat in config.seats.roles:
        if seat not in agents:
            yield (
                "seats.roles",
                f"the environment has no agent {seat!r} (it has {named}), so the worker of this seat would wait for "
                "ever",
            )
    roles = config.players
    for role in config.roles:
        if not roles.is_of(role.partition("/")[0], agents):
            yield f"roles.{role}", f"the environment has no agent {role!r} (it has {named}), so nothing plays this role"
    past = {role: past_name(roles.named[role], 0) for role, pool in roles.pools.items() if not pool.latest_share}
    cast = roles.of_episode(past)
    below = {policy for role, policy in cast.named.items() if "/" in role}  # subagents are known when they act
    newest = {cast.policy_of(agent) for agent in agents} | below
    for policy in config.trained_policies:
        algorithm = config.algorithm_of(policy)
        if policy in newest or algorithm.brings_tasks or algorithm.learns_conversations:
            continue
        if policy in {roles.named[role] for role in past}:
            advice = "past versions of it play, from which nothing is learned; make one of its roles no pool, or set "
            advice += "pool.latest_share above 0"
        else:
            advice = f"give it a role (roles.AGENT = {policy!r}), or set policies.{policy}.frozen = true"
        yield (
            f"policies.{policy}",
            f"the policy {policy!r} is trained, and its newest weights play none of the environment's agents "
            f"({named}), so that it would learn nothing: {advice}",
        )


def check_roles(config: JobConfig, agents: Sequence[str]) -> None:
    """Raise ConfigError if external players, roles or policies do not fit the environment's agents. `agents`: ():
    unknown before an episode.
    """
    for key, text in impossible_roles(config, agents):
        raise ConfigError(f"{key}: {text}")


def odd_roles(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each policy without a role.

    That is valid if external workers call policies by name.
    """
    roles = config.players
    teachers = {config.teacher_of(name) for name in config.trained_policies}
    played = {roles.default, *roles.named.values(), *teachers}
    for name in config.policies:
        if name not in played:
            yield (
                f"policies.{name}",
                f"no role has the policy {name!r}, so the environment's agents never call it; give it one in [roles], "
                "or remove it",
            )


def past_copies(config: JobConfig, policy: str) -> int:
    """Return how many past versions of a policy the engine may hold, each with its own weights."""
    if config.kind != "training":
        return 0
    roles = config.players
    return sum(pool.size for role, pool in roles.pools.items() if roles.named[role] == policy)


def numerics_of(config: JobConfig) -> dict[str, str]:
    """Return what computes in a job's processes, without threads; {}: nothing does. The job has no base server."""
    if not config.engine.has_model:
        return {}
    import torch

    make_deterministic(config.deterministic)  # it sets variables that are compared
    parts = [(one.device, one.dtype) for one in _engine_computes(config)]
    parts += [(config.trainer.device, config.trainer.dtype)] if config.kind == "training" else []
    on_cpu = {dtype for device, dtype in parts if device_of(device, "device").type == "cpu"}
    rounded = "bfloat16" in on_cpu and precision_of("bfloat16", device_of("cpu", "device")) == torch.bfloat16
    found = numerics(rounded)
    if "bfloat16" in on_cpu and not rounded:
        found["products"] = "float32, because this processor does not multiply bfloat16"
    return found


def threads_of(config: JobConfig) -> dict[str, str]:
    """Return the number of compute threads, which may change rounding: as set, or all cores of this process."""
    import torch

    every = f"{torch.get_num_threads()} of {available_cores()} cores"
    found = {"trainer_threads": str(config.trainer.threads or every)} if config.kind == "training" else {}
    for computes in _engine_computes(config):
        found["engine_threads"] = str(computes.threads or every)
    return found


def _engine_computes(config: JobConfig) -> list[Computes]:
    """Return how the job's processes compute its engine's models, kind by kind."""
    found = [driver_of(table).computes(table) for table in config.engine.tables]
    return [computes for computes in found if computes is not None]


async def note_numerics(log: RunLog, now: dict[str, str], deterministic: bool) -> dict[str, str]:
    """Record the numerics of a run; return the event: `text` for people, and `problem`, why compiled kernels are not
    used. `deterministic`: whether they must equal the earlier ones.
    """
    known = await log.fact(NUMERICS)
    before: dict[str, str] = now if known is None else orjson.loads(known)
    if deterministic:
        check_numerics(before, now, "the steps so far were computed")
    await log.set_fact(NUMERICS, orjson.dumps(now).decode())
    shown = [now[name] for name in ("processor", KERNELS, "products") if name in now]
    data = {"text": f"computes on {', '.join(shown)}, torch {now['torch']}", "problem": now.get(PROBLEM, "")}
    if changed := differences(before, now):
        data["text"] += f"; before: {changed}"
    await log.add_event("numerics", data)
    return data
