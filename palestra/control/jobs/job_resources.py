"""What a job holds: what was asked for, and what its configuration makes of it: workers, ranks and runners."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from palestra.config import JobConfig
from palestra.config.engine import EmbeddedEngineConfig
from palestra.control.jobs.shared_jobs import LIGHT_CPUS
from palestra.errors import InvalidRequest
from palestra.types.control_wire import BundleBody, ProcessBody, ResourcesBody
from palestra.types.jobs import Bundle, Resources, Role

_KEYS: dict[Role, str] = {"engine": "engine.replicas", "trainer": "trainer.devices", "runner": "environment.runners"}
_THREADS: dict[Role, str] = {"engine": "engine.threads", "trainer": "trainer.threads"}


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of one role that a job's configuration asks for.

    Attributes:
        count: how many there may be; 0: the role can have no process of its own.
        cores: of each, where it has no bundle.
        in_job: whether the only one runs in the job's own process, unless it has a bundle.
        device: where each computes, as the configuration has it; None: it computes with no model.
    """

    count: int
    cores: int = 1
    in_job: bool = False
    device: Literal["auto", "cpu", "cuda"] | None = None


def processes_of(config: JobConfig) -> dict[Role, Processes]:
    """Return the processes of a job beside its own, by role."""
    training = config.kind == "training"
    found: dict[Role, Processes] = {"engine": Processes(0), "trainer": Processes(0), "runner": Processes(0)}
    if training:
        found["runner"] = Processes(config.environment.runners or 0)
    if config.base is not None:  # its base server has the engine and the trainer
        return found
    # A service refuses the engines that are servers of other projects, so that all workers are processes of the job.
    engine, workers = config.engine, config.engine.workers
    threads, device = (engine.threads, engine.device) if isinstance(engine, EmbeddedEngineConfig) else (None, None)
    found["engine"] = Processes(workers, threads or 1, in_job=workers == 1, device=device)
    if training and config.trainer.devices > 1:
        trainer = config.trainer
        found["trainer"] = Processes(trainer.devices, trainer.threads or 1, device=trainer.device)
    return found


def resources_of(asked: ResourcesBody, config: JobConfig, adapters: int) -> Resources:
    """Return what a job holds. One with adapters on a shared base, which computes for it, needs few cores.

    Processes without a bundle are on the job's node, and their cores are added to those that were asked for: so a
    tenant can't have more ranks or workers than it is counted for.

    Args:
        asked: the resources of the submission.
        config: the job, checked.
        adapters: of the job on a shared base.

    Raises:
        InvalidRequest: a bundle is of a role that the job has no process of, stands twice, has another number, or
            fewer cores than its processes use.
    """
    processes = processes_of(config)
    for number, body in enumerate(asked.bundles):
        if processes[body.role].count == 0:
            where = f"resources.bundles.{number}"
            raise InvalidRequest(f"{where} is for role {body.role!r}, and {_why_none(body.role, config)}", where)
    bundles = tuple(_bundle(number, body, processes[body.role]) for number, body in enumerate(asked.bundles))
    roles = Counter(bundle.role for bundle in bundles)
    if twice := [role for role, count in roles.items() if count > 1]:
        raise InvalidRequest(
            f"resources.bundles has a role twice ({twice[0]!r}); all processes of a role hold alike", "resources"
        )
    light = adapters > 0 and "cpus" not in asked.model_fields_set and asked.gpus == 0
    own = LIGHT_CPUS if light else asked.cpus
    here = sum(one.count * one.cores for role, one in processes.items() if role not in roles and not one.in_job)
    return Resources(
        cpus=own + here,
        gpus=asked.gpus,
        memory_gib=asked.memory_gib,
        gpu_kind=asked.gpu_kind,
        labels=asked.labels,
        bundles=bundles,
        placement=asked.placement,
    )


def _why_none(role: Role, config: JobConfig) -> str:
    """Return why a job has no process of a role, and what to do about it."""
    if config.base is not None and role != "runner":
        return "the base server of the job samples and trains for it; leave the bundle out"
    if config.kind == "inference":
        return "a job of kind 'inference' has no such process; leave the bundle out"
    least = " to 2 or more" if role == "trainer" else ""
    return f"the job has no such process: set {_KEYS[role]}{least}, or leave the bundle out"


def _bundle(number: int, body: BundleBody, processes: Processes) -> Bundle:
    """Return a bundle with its number of processes, which the configuration says.

    Raises:
        InvalidRequest: another number was asked for; the processes would compute with more cores than they hold, or on
            other GPUs; or they hold what no machine can give.
    """
    key, where = _KEYS[body.role], f"resources.bundles.{number}"
    if body.count not in (None, processes.count):
        raise InvalidRequest(
            f"{where}.count is {body.count}, and {key} is {processes.count}; leave count out, or make them equal", where
        )
    try:
        found = Bundle(role=body.role, count=processes.count, **_fields(body))
    except InvalidRequest as error:
        field = where + (error.field or "").removeprefix("resources")
        raise InvalidRequest(f"{where}, for role {body.role!r}: {error}", field) from None
    if processes.cores > max(body.cpus, 1):
        raise InvalidRequest(
            f"{where}.cpus is {body.cpus:g}, and {_THREADS[body.role]} is {processes.cores}; make them equal, or set "
            "fewer threads",
            where,
        )
    if body.cpus < LIGHT_CPUS and body.gpus < 1:
        raise InvalidRequest(
            f"{where}.cpus is {body.cpus:g}; a process of role {body.role!r} without a GPU of its own holds at least "
            f"{LIGHT_CPUS:g}",
            where,
        )
    if processes.device is not None and (why := _unfit_gpus(body.role, body.gpus, processes.device)):
        raise InvalidRequest(f"{where}.gpus is {body.gpus:g}, and {why}", f"{where}.gpus")
    return found


def _unfit_gpus(role: Role, gpus: float, device: str) -> str | None:
    """Return why processes with a model can't use so many GPUs each, and what to change; None: they can."""
    if device == "cpu" and gpus > 0:
        return f"{role}.device is 'cpu'; leave gpus out, or set the device to 'auto'"
    if device == "cuda" and gpus == 0:
        return f"{role}.device is 'cuda'; give gpus=1, or set the device to 'auto'"
    if gpus > 1:
        return f"each process of role {role!r} computes on one GPU; give gpus=1, and raise {_KEYS[role]}"
    if role == "trainer" and 0 < gpus < 1:
        return "each rank needs a GPU of its own (NCCL refuses two on one); give gpus=1, or none"
    return None


def body_of(resources: Resources) -> ResourcesBody:
    """Return what a job holds, as answers say it."""
    bundles = [BundleBody(role=bundle.role, count=bundle.count, **_fields(bundle)) for bundle in resources.bundles]
    return ResourcesBody(bundles=bundles, placement=resources.placement, **_fields(resources))


def _fields(of: Resources | Bundle | BundleBody) -> dict[str, Any]:
    """Return what one process holds, by the names that records and bodies have in common."""
    return {name: getattr(of, name) for name in ProcessBody.model_fields}
