"""A job's resources: requested ones, and those that follow from its configuration: workers, ranks and runners."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from palestra.config import Alike, JobConfig
from palestra.errors import InvalidRequest
from palestra_control.jobs import Bundle, Resources, Role
from palestra_control.wire import BundleBody, ProcessBody, ResourcesBody
from palestra_service.jobs.shared_jobs import LIGHT_CPUS

_KEYS: dict[Role, str] = {"engine": "engine.replicas", "trainer": "trainer.devices", "runner": "environment.runners"}
_THREADS: dict[Role, str] = {"engine": "engine.threads", "trainer": "trainer.threads"}


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of one role in a job's configuration.

    Attributes:
        kinds: groups of equal ones; (): the role cannot have its own process.
        in_job: whether a single one runs in the job's own process, unless it has a bundle.
    """

    kinds: tuple[Alike, ...] = ()
    in_job: bool = False

    @property
    def count(self) -> int:
        """Return the largest possible number."""
        return sum(kind.count for kind in self.kinds)

    @property
    def cores(self) -> int:
        """Return the largest number of cores of one of them, without a bundle."""
        return max((kind.cores for kind in self.kinds), default=1)

    @property
    def all_cores(self) -> int:
        """Return the cores of all together, without a bundle."""
        return sum(kind.count * kind.cores for kind in self.kinds)

    @property
    def all_cards(self) -> int:
        """Return the GPUs of all that use whole ones."""
        return sum(kind.count * (kind.cards or 0) for kind in self.kinds)


def processes_of(config: JobConfig) -> dict[Role, Processes]:
    """Return a job's processes apart from its own, by role."""
    training = config.kind == "training"
    found: dict[Role, Processes] = {"engine": Processes(), "trainer": Processes(), "runner": Processes()}
    if training and config.environment.runners:
        found["runner"] = Processes((Alike(config.environment.runners),))
    if config.base is not None:  # its base server has the engine and the trainer
        return found
    policies = len(config.policies)
    kinds = tuple(table.resources(policies) for table in config.engine.tables if table.started_count)
    found["engine"] = Processes(kinds, in_job=not config.engine.pooled)
    if training and config.trainer.devices > 1:
        trainer = config.trainer
        found["trainer"] = Processes((Alike(trainer.devices, trainer.threads or 1, trainer.device),))
    return found


def resources_of(asked: ResourcesBody, config: JobConfig, adapters: int) -> Resources:
    """Return the resources of a job. With adapters on a shared base, which computes for it, it needs few cores.

    Processes without a bundle are on the job's node, and their cores are added to the requested ones, so that a tenant
    cannot have more ranks or workers than it is counted for.
    """
    processes = processes_of(config)
    for number, body in enumerate(asked.bundles):
        if processes[body.role].count == 0:
            where = f"resources.bundles.{number}"
            raise InvalidRequest(f"{where} is for role {body.role!r}, and {_why_none(body.role, config)}", where)
    bundles = tuple(_bundle(number, body, processes[body.role]) for number, body in enumerate(asked.bundles))
    roles = Counter(bundle.role for bundle in bundles)
    if "engine" in roles:
        _check_transfer(config)
    if twice := [role for role, count in roles.items() if count > 1]:
        raise InvalidRequest(
            f"resources.bundles has a role twice ({twice[0]!r}); all processes of a role hold alike", "resources"
        )
    light = adapters > 0 and "cpus" not in asked.model_fields_set and asked.gpus == 0
    own = LIGHT_CPUS if light else asked.cpus
    here = sum(one.all_cores for role, one in processes.items() if role not in roles and not one.in_job)
    if "engine" not in roles:
        _check_cards(asked.gpus, processes["engine"])
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
    """Return why a job has no process of a role, and the remedy."""
    if config.base is not None and role != "runner":
        return "the base server of the job samples and trains for it; leave the bundle out"
    if role == "engine":
        return "the servers of its engine run already; leave the bundle out"
    if config.kind == "inference":
        return "a job of kind 'inference' has no such process; leave the bundle out"
    least = " to 2 or more" if role == "trainer" else ""
    return f"the job has no such process: set {_KEYS[role]}{least}, or leave the bundle out"


def _bundle(number: int, body: BundleBody, processes: Processes) -> Bundle:
    """Return a bundle with the number of processes from the configuration."""
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
    for kind in processes.kinds:
        if why := _unfit_gpus(body.role, body.gpus, kind):
            raise InvalidRequest(f"{where}.gpus is {body.gpus:g}, and {why}", f"{where}.gpus")
    return found


def _check_transfer(config: JobConfig) -> None:
    """Refuse broadcasts of weights to bundles: they are on other machines, where workers read them from a folder."""
    for table in config.engine.tables:
        if table.started_count and table.transfer != "file":
            raise InvalidRequest(
                f"engine.weight_transfer is {table.transfer!r}, and {table.product} in a bundle reads new weights "
                "from a folder of the service; leave it out, or leave the bundle for role 'engine' out",
                "config.engine.weight_transfer",
            )


def _check_cards(gpus: float, engine: Processes) -> None:
    """Raise an error for too few GPUs for servers beside the job's own process."""
    needed, product = engine.all_cards, "".join(kind.product for kind in engine.kinds if kind.cards)
    if gpus < needed and (gpus > 0 or any(kind.needs_cards for kind in engine.kinds)):
        raise InvalidRequest(
            f"resources.gpus is {gpus:g}, and the {product} servers of the job take {needed} whole ones "
            f"(engine.replicas x policies x engine.tensor_parallel); give gpus={needed} or more, or a bundle for role "
            "'engine'",
            "resources.gpus",
        )


def _unfit_gpus(role: Role, gpus: float, kind: Alike) -> str | None:
    """Return why processes cannot use so many GPUs each, and what to change; None: they can."""
    device = kind.device
    if device is None:
        return None
    if kind.cards is not None:
        if gpus == kind.cards or (gpus == 0 and not kind.needs_cards):
            return None
        return (
            f"the {kind.product} servers of each worker take {kind.cards} whole ones (policies x "
            f"engine.tensor_parallel); give gpus={kind.cards}"
        )
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
    """Return a job's resources in the form of answers."""
    bundles = [BundleBody(role=bundle.role, count=bundle.count, **_fields(bundle)) for bundle in resources.bundles]
    return ResourcesBody(bundles=bundles, placement=resources.placement, **_fields(resources))


def _fields(of: Resources | Bundle | BundleBody) -> dict[str, Any]:
    """Return one process's resources, by the common names of records and bodies."""
    return {name: getattr(of, name) for name in ProcessBody.model_fields}
