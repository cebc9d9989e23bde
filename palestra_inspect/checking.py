"""Finds problems of a job on this machine before it is started: each finding names the key to change.

No file is written and no model loaded; `trial` does the rest with a short run of the job itself.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palestra.agents import named_agents
from palestra.algorithms.base import RecordedEpisodes
from palestra.algorithms.registry import create_algorithm
from palestra.client.harness import check_harness_config
from palestra.client.task_files import read_task_files
from palestra.config import DEFAULT_CONTEXT, JobConfig
from palestra.config.budget import unpriced_servers, unused_prices
from palestra.engine.driver import driver_of
from palestra.envs.catalog import catalog_entry
from palestra.envs.tasks import Split
from palestra.errors import ConfigError, InvalidEnvironment, ModelError, PalestraError, StoreError
from palestra.extras import missing_extra
from palestra.http.server import listen
from palestra.learner.recordings import chosen_episodes, learned_policies
from palestra.models.device import available_bytes
from palestra.runtime.early_checks import (
    agents_of,
    check_trainer,
    devices,
    impossible_roles,
    not_reproducible,
    odd_roles,
)
from palestra.runtime.model_memory import (
    ModelMemory,
    amount,
    is_on_card,
    machine_bytes,
    memory_of,
    memory_shortage,
    read_facts,
    references_of,
)
from palestra.runtime.tasks import named_environment, task_of
from palestra.runtime.terms import HERE
from palestra.types.conversations import read_conversations
from palestra_inspect.environment_check import check_environment

GIB = 2**30
MOST_STEPS = 100_000  # of a job, in which steps without an update are looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckFinding:
    """A problem, or a useful fact.

    Attributes:
        key: the configuration key to change, dotted.
        fatal: whether the job cannot run or learn; otherwise the finding is a warning.
    """

    key: str
    text: str
    fatal: bool = True


def check_job(config: JobConfig) -> list[CheckFinding]:
    """Return the problems of a job with this configuration, this machine and the job's files."""
    checks: list[Callable[[JobConfig], Iterator[CheckFinding]]] = [_port, _folder, _devices, _engine, _prices]
    if config.kind == "training":
        checks += [_tasks, _environments, _harness, _algorithms, _updates]
    if config.loads_models:
        checks.append(_models)
    return [finding for check in checks for finding in check(config)]


def existing_parent(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _port(config: JobConfig) -> Iterator[CheckFinding]:
    try:
        listen(config.server.host, config.server.port, or_any=not config.server.port_is_given).close()
    except ConfigError as error:
        yield CheckFinding(key="server.port", text=str(error))


def _folder(config: JobConfig) -> Iterator[CheckFinding]:
    """Check the run's folder: whether it holds a run or cannot be written."""
    folder = config.folder
    if config.run_dir is not None and (folder / "run.db").exists():
        yield CheckFinding(
            key="run_dir",
            text=f"{folder} has a run already: start with --resume (in a script resume=True), or choose another folder",
            fatal=False,
        )
    parent = existing_parent(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        yield CheckFinding(key="run_dir", text=f"{folder} can't be made: {parent} is no folder that may be written to")


def _devices(config: JobConfig) -> Iterator[CheckFinding]:
    """Check for missing devices, and for a GPU in a deterministic job."""
    if not config.loads_models:
        return
    import torch

    there = torch.cuda.is_available()
    parts = devices(config)
    for key, device in parts.items():
        if device == "cuda" and not there:
            yield CheckFinding(
                key=key, text=f"{key} is 'cuda', and torch sees no CUDA device here; use 'cpu' or 'auto'"
            )
        elif config.deterministic and there and device != "cpu":
            yield CheckFinding(key=key, text=not_reproducible(key))
    if config.trainer.cpu_offload and "cuda" not in parts.values():
        try:
            check_trainer(config, HERE)
        except ConfigError as error:
            yield CheckFinding(key="trainer.cpu_offload", text=str(error))


def _engine(config: JobConfig) -> Iterator[CheckFinding]:
    """Check what the engine needs: a program, running servers, their keys."""
    for key, table in config.engine.keyed_tables.items():
        for wrong, text in driver_of(table).check(config, key, table):
            yield CheckFinding(key=wrong, text=text)


def _prices(config: JobConfig) -> Iterator[CheckFinding]:
    """Check that what is asked for tokens has a price, if the job has prices, and that each price is of something."""
    for key, text in unpriced_servers(config):
        yield CheckFinding(key=key, text=text, fatal=False)
    for name in unused_prices(config):
        text = f"prices.tokens has {name!r}, and no policy, model or server of the job has that name"
        yield CheckFinding(key="prices.tokens", text=text, fatal=False)


def _tasks(config: JobConfig) -> Iterator[CheckFinding]:
    try:
        read_task_files(config)
    except ConfigError as error:
        yield CheckFinding(key="tasks", text=str(error))


def _environments(config: JobConfig) -> Iterator[CheckFinding]:
    """Check each environment of the job."""
    for name, job in config.each_environment.items():
        for found in _environment(job):
            yield replace(found, key=f"environments.{name}", text=f"{name}: {found.text}") if name else found


def _environment(config: JobConfig) -> Iterator[CheckFinding]:
    """Make the environment that the job names, and play it with good and bad actions."""
    name = config.environment.full_name
    try:
        named_agents(config.environment.agent, config.environment.agent_settings)
    except ConfigError as error:
        yield CheckFinding(key="environment.agent", text=str(error))
        return
    if config.environment.url is not None:
        yield from _environment_server(config)
        return
    if name is None:
        if config.seats.roles and config.kind == "training":
            text = "seats are agents of an environment that the server plays: name one in environment.name"
            yield CheckFinding(key="seats.roles", text=text)
        return
    try:
        make = named_environment(config)
        assert make is not None
        entry = catalog_entry(name)
        generated = entry.generate
        generated("validation", config.environment.validation_tasks, config.seed)
        tasks = generated("train", config.environment.train_tasks, config.seed)
        (entry.check or check_environment)(make, [_first_task(config) or tasks[0]])
        agents = agents_of(make())
        for key, text in impossible_roles(config, agents):
            yield CheckFinding(key=key, text=text)
        for key, text in odd_roles(config):
            yield CheckFinding(key=key, text=text, fatal=False)
    except ModuleNotFoundError as error:
        said = missing_extra(error) or f"{error.name} is not installed; install gymnasium and reasoning-gym"
        yield CheckFinding(key="environment.name", text=f"environment {name!r} can't be imported: {said}")
    except ConfigError as error:
        key = "environment.settings" if "setting" in str(error) else "environment"
        yield CheckFinding(key=key, text=str(error))
    except InvalidEnvironment as error:
        yield CheckFinding(key="environment", text=f"environment {name!r} fails its check: {error}")


def _harness(config: JobConfig) -> Iterator[CheckFinding]:
    """Check that the harness is installed, and that its score function can be found."""
    try:
        if config.harness is not None:
            check_harness_config(config.harness)
    except ConfigError as error:
        yield CheckFinding(key="harness", text=str(error))


def _environment_server(config: JobConfig) -> Iterator[CheckFinding]:
    """Play the environment of the job's environment server, with the first task of the job's files, if there is one."""
    try:
        make = named_environment(config)
        assert make is not None
        for key, text in impossible_roles(config, agents_of(make())):
            yield CheckFinding(key=key, text=text)
        if (task := _first_task(config)) is not None:
            check_environment(make, [task])
    except InvalidEnvironment as error:
        yield CheckFinding(key="environment.url", text=f"the environment of {config.environment.url} fails: {error}")
    except PalestraError as error:
        yield CheckFinding(key="environment.url", text=str(error))


def _first_task(config: JobConfig) -> dict[str, Any] | None:
    """Return the first task of the job's files; None: there is none, or `_tasks` reports a problem."""
    return next(iter(_tasks_of(config, "train" if _recorded(config) is None else "validation")), None)


def _tasks_of(config: JobConfig, split: Split) -> Iterable[dict[str, Any]]:
    """Return the tasks of a file of the job; empty without a file, or if `_tasks` reports a problem."""
    try:
        return read_task_files(config).get(split, ())
    except ConfigError:
        return []


def _recorded(config: JobConfig) -> RecordedEpisodes | None:
    """Return the recorded episodes that the job trains on; None: it samples, or its algorithm can't be created here."""
    try:
        made = [create_algorithm(config.algorithm_of(name)) for name in config.trained_policies]
    except ConfigError:
        return None
    return next((algorithm.recorded for algorithm in made if algorithm.recorded is not None), None)


def _algorithms(config: JobConfig) -> Iterator[CheckFinding]:
    """Check what the algorithms need, once for each table of the configuration."""
    for key, name in {config.algorithm_key(name): name for name in reversed(config.trained_policies)}.items():
        yield from _algorithm(config, key, name)


def _algorithm(config: JobConfig, key: str, policy: str) -> Iterator[CheckFinding]:
    """Check what an algorithm needs: a run's episodes, conversations, a teacher."""
    settings = config.algorithm_of(policy)
    try:
        algorithm = create_algorithm(settings)
    except ConfigError as error:
        yield CheckFinding(key=f"{key}.name", text=str(error))
        return
    served = settings.served_teacher
    if served is not None and served.key_variable is not None and not os.environ.get(served.key_variable):
        text = f"the variable {served.key_variable} is not set, and has to hold the key of {served.url}"
        yield CheckFinding(key=f"{key}.teacher_server.key_variable", text=text)
    if "teacher_logprobs" in algorithm.needs and config.teacher_of(policy) is None and served is None:
        text = "the job has no policy that teaches; add one to [policies] with `frozen = true`"
        yield CheckFinding(key=f"{key}.teacher", text=text)
    yield from _recordings(config, policy, algorithm.recorded)


def _recordings(config: JobConfig, policy: str, recorded: RecordedEpisodes | None) -> Iterator[CheckFinding]:
    """Check the recorded episodes that an algorithm trains on, if any."""
    try:
        if recorded is not None and recorded.run_dir is not None:
            policies = learned_policies(recorded.run_dir, policy)
            chosen_episodes(recorded, recorded.run_dir, policies)
        elif recorded is not None:
            for data in _tasks_of(config, "train"):
                read_conversations(task_of(data), pairs=recorded.pairs)
    except (ConfigError, StoreError) as error:
        key, brings = config.algorithm_key(policy), config.algorithm_of(policy).brings_tasks
        where = f"{key}.from_run" if brings else "tasks.train"
        yield CheckFinding(
            key=where, text=str(error).removeprefix("algorithm.from_run: ").removeprefix("tasks.train: ")
        )
    if recorded is not None and recorded.run_dir is None and config.tasks.train is None and config.environment.name:
        kind = "pairs" if recorded.pairs else "conversations"
        text = f"the tasks of {config.environment.name!r} are no {kind}; name a file in tasks.train, or from_run"
        yield CheckFinding(key="tasks.train", text=text)


def _updates(config: JobConfig) -> Iterator[CheckFinding]:
    """Check for steps that update no policy, so that their episodes are useless."""
    period = math.lcm(*(config.policies[name].updates.every_steps for name in config.trained_policies))
    steps = range(1, min(config.steps, period, MOST_STEPS) + 1)
    idle = [step for step in steps if not any(config.updates_in(name, step) for name in config.trained_policies)]
    if idle:
        shown = ", ".join(map(str, idle[:3])) + (", …" if len(idle) > 3 or config.steps > len(steps) else "")
        yield CheckFinding(
            key=f"policies.{config.trained_policies[-1]}.updates",
            text=f"no policy is updated in some steps ({shown}), whose episodes are played for nothing; let "
            "`every_steps` of the policies cover all steps",
            fatal=False,
        )


def _models(config: JobConfig) -> Iterator[CheckFinding]:
    """Check all policies' models: existence, context, memory and disk."""
    models, references = {}, {}
    for name, policy in config.policies.items():
        try:
            models[name] = _, facts = read_facts(policy.model)
        except ModelError as error:
            yield CheckFinding(key=f"policies.{name}.model", text=_of_model(policy.model, error))
            continue
        if facts.context is not None and policy.max_context > facts.context and policy.max_context != DEFAULT_CONTEXT:
            yield CheckFinding(
                key=f"policies.{name}.max_context",
                text=f"max_context is {policy.max_context} and {policy.model} has {facts.context} positions",
            )
    for key, model in references_of(config).items():
        try:
            folder, facts = read_facts(model)
            references[folder] = facts
        except ModelError as error:
            yield CheckFinding(key=key, text=_of_model(model, error))
    needed = memory_of(config, models, references)
    if (found := memory_shortage(config, needed)) is not None:
        yield CheckFinding(key="engine" if config.engine.started_count > 1 else "model", text=str(found))
    else:
        yield from _caches(config, needed)
    yield from _disk(config, needed)


def _caches(config: JobConfig, needed: ModelMemory) -> Iterator[CheckFinding]:
    """Check that memory is available for keys and values up to `cache_gib`, which is allocated on demand."""
    models, free = machine_bytes(config, needed), available_bytes()
    for key, table in config.engine.keyed_tables.items():
        computes = driver_of(table).computes(table)
        if computes is None or computes.cache_gib is None or is_on_card(computes.device):
            continue
        caches = computes.cache_gib * table.started_count
        if caches * GIB + models > free:
            yield CheckFinding(
                key=f"{key}.cache_gib",
                text=f"keys and values may take {caches:,.1f} GiB and the models take {amount(models)}, and "
                f"{amount(free)} are free; with many or long replies the job would run out of memory: "
                f"lower {key}.cache_gib",
                fatal=False,
            )


def _disk(config: JobConfig, sizes: ModelMemory) -> Iterator[CheckFinding]:
    """Compare the bytes of checkpoints and past versions with the free disk space."""
    # One more than are kept: the oldest is removed when the newest is whole.
    saved, disk = sizes.saved * (config.checkpoint.keep + 1), shutil.disk_usage(existing_parent(config.folder)).free
    said = [f"{config.checkpoint.keep + 1} checkpoints take {saved / GIB:.1f} GiB"]
    if sizes.versions:
        said.append(f"the past versions of pools {sizes.versions / GIB:.1f} GiB")
    if saved + sizes.versions > disk:
        yield CheckFinding(
            key="checkpoint.keep",
            text=f"{' and '.join(said)}, and {config.folder} has room for {disk / GIB:.1f} GiB; free some, keep fewer, "
            "or choose another run_dir",
        )
    elif sizes.versions > GIB // 10:
        text = f"the past versions of pools take up to {sizes.versions / GIB:.1f} GiB of the disk"
        yield CheckFinding(key="roles", text=text, fatal=False)


def _of_model(model: str, error: Exception) -> str:
    text = str(error).splitlines()[0]
    return text if repr(model) in text else f"model {model!r}: {text}"
