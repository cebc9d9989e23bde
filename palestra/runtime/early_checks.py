"""What is wrong with the trainer and the engine of a job, found before anything is loaded or started."""

from __future__ import annotations

from palestra.config import JobConfig
from palestra.engine.driver import driver_of
from palestra.errors import ConfigError
from palestra.models.device import DeviceName, device_of
from palestra.runtime.places import JobPlaces


def check_trainer(config: JobConfig, places: JobPlaces) -> None:
    """Refuse a trainer that this machine has no device for.

    Args:
        places: where its processes run; ranks with bundles of their own look at their machines themselves.

    Raises:
        ConfigError: there is no such device, or weights are to be kept in the memory in which they are anyway.
    """
    if config.kind != "training" or not config.loads_models or places.trainer is not None:
        return
    device = device_of(config.trainer.device, "trainer.device")
    if config.trainer.cpu_offload:
        from palestra.trainer.sharded.rank import check_offload

        check_offload(config.trainer, device)


def check_reproducible(config: JobConfig, places: JobPlaces) -> None:
    """Refuse a deterministic job that would compute on a GPU, which gives other bits from run to run.

    Args:
        places: where its processes run; those with bundles of their own are on other machines, perhaps.

    Raises:
        ConfigError: a part of the job would.
    """
    if not (config.deterministic and config.loads_models):
        return
    for key, device in devices(config).items():
        elsewhere = places.trainer if key == "trainer.device" else places.engine
        if elsewhere is None and device_of(device, key).type == "cuda":
            raise ConfigError(not_reproducible(key))


def not_reproducible(key: str) -> str:
    """Return what is wrong with a deterministic job that would compute on a GPU."""
    return (
        "deterministic = true is only kept on a CPU, and this machine would use its GPU; "
        f"set {key} = 'cpu', or deterministic = false"
    )


def devices(config: JobConfig) -> dict[str, DeviceName]:
    """Return what the models of a job compute on, by key, where that is not the part of another project's server."""
    found = {key: driver_of(table).computes(table) for key, table in config.engine.keyed_tables.items()}
    devices = {f"{key}.device": computes.device for key, computes in found.items() if computes is not None}
    return devices | ({"trainer.device": config.trainer.device} if config.kind == "training" else {})


def check_models(config: JobConfig) -> None:
    """Refuse models that the engine would refuse after minutes.

    Raises:
        ConfigError: a policy has such a model; or what the engine needs is not installed.
    """
    for table in config.engine.tables:
        for key, text in driver_of(table).check_models(config, table):
            raise ConfigError(f"{key}: {text}")
