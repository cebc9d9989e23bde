"""Checks the trainer and engine of a job before anything is loaded or started."""

from __future__ import annotations

from palestra.config import JobConfig
from palestra.engine.driver import driver_of
from palestra.errors import ConfigError
from palestra.models.device import DeviceName, device_of
from palestra.runtime.terms import JobPlaces


def check_trainer(config: JobConfig, places: JobPlaces) -> None:
    """Raise ConfigError if this machine has no device for the trainer. `places`: where its processes run; ranks with
    bundles of their own check their machines themselves.
    """
    if config.kind != "training" or not config.loads_models or places.trainer is not None:
        return
    device = device_of(config.trainer.device, "trainer.device")
    if config.trainer.cpu_offload:
        from palestra.trainer.sharded.rank import check_offload

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
