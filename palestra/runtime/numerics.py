"""Records a job's numerics with its run, and compares them when a deterministic job continues."""

from __future__ import annotations

import orjson

from palestra.config import JobConfig
from palestra.engine.driver import Computes, driver_of
from palestra.models.device import available_cores, device_of, make_deterministic, precision_of
from palestra.models.numerics import KERNELS, PROBLEM, check_numerics, differences, numerics
from palestra.store import RunLog
from palestra.store.run_log import NUMERICS


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
