"""`palestra submit`: submits a job to the service, from a configuration or another job's result."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command, add_control, add_set, overrides, time_span
from palestra.errors import ConfigError
from palestra.terminal import say

ROLES = ("engine", "trainer", "runner")


def add_submit(commands: Any) -> None:
    """Add the command `submit`, which takes a configuration and the job's resources."""
    parser = add_command(
        commands,
        "submit",
        _run,
        "submit a job to a control plane (palestra serve)",
        "  palestra submit recipes/addition.toml --gpus 0.5 --watch\n"
        "  palestra submit --from-job job-1f3a5c7e9b2d4f60   # serve what it has trained",
    )
    parser.add_argument(
        "config",
        metavar="JOB.TOML",
        type=Path,
        nargs="?",
        help="the job, in TOML (docs/reference/configuration.md); without it, that of --from-job",
    )
    parser.add_argument(
        "--kind", choices=("training", "inference"), help="train the model, or serve it; without it, what JOB.TOML says"
    )
    parser.add_argument(
        "--from-job", metavar="JOB", help="start from the weights of a job; without JOB.TOML, serve them"
    )
    parser.add_argument(
        "--from-step", metavar="STEP", type=int, help="step of the checkpoint of --from-job; without it, the newest"
    )
    parser.add_argument("--name", help="name for people; without it, the configuration's")
    parser.add_argument(
        "--cpus",
        metavar="CORES",
        type=float,
        help="cores that the job holds while it runs; without it, 1, or 0.25 on a shared base",
    )
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        type=float,
        default=0.0,
        help="GPUs that the job holds: a part of one below 1, whole ones above",
    )
    parser.add_argument(
        "--memory-gib",
        metavar="GIB",
        type=float,
        default=0.0,
        help="memory that the job holds; a job that uses more is ended. 0: its share of the machine",
    )
    parser.add_argument(
        "--gpu-kind", metavar="KIND", help="kind of GPU that its node has to have, such as H100; without it, any"
    )
    parser.add_argument(
        "--label",
        metavar="NAME=VALUE",
        type=_label,
        action="append",
        default=[],
        help="a label that its node has to have; may be given several times",
    )
    parser.add_argument(
        "--bundle",
        metavar="ROLE:KEY=VALUE,…",
        type=_bundle,
        action="append",
        default=[],
        help="what each process of a role holds, perhaps on another node: engine:cpus=4,gpus=1 (docs/how-to/nodes.md); "
        "may be given several times: for engine, trainer and runner",
    )
    parser.add_argument(
        "--placement",
        choices=("PACK", "STRICT_PACK", "SPREAD"),
        default="PACK",
        help="how its processes are placed: on few nodes, on one node, or on many",
    )
    parser.add_argument(
        "--time-limit",
        metavar="TIME",
        type=time_span,
        help="how long the job may run: 90m, 1.5h or 300 (seconds); then it saves and is cancelled. A job with a limit "
        "may start before larger ones that wait. Without it, any time",
    )
    parser.add_argument(
        "--priority", choices=("low", "normal", "high"), default="normal", help="place in the tenant's queue"
    )
    parser.add_argument(
        "--private",
        action=argparse.BooleanOptionalAction,
        help="only you and the admins of your tenant see the job; without it, what these have decided",
    )
    parser.add_argument(
        "--attached", action="store_true", help="cancel the job when no client has asked for it for a while"
    )
    parser.add_argument("--watch", action="store_true", help="show the job until it is over; Ctrl-C leaves it running")
    add_set(parser)
    add_control(parser)


def _label(text: str) -> tuple[str, str]:
    """Return a label's name and value."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _bundle(text: str) -> dict[str, Any]:
    """Return a bundle as the service takes it: `engine:cpus=4,gpus=1,labels.zone=a`."""
    role, _, rest = text.partition(":")
    if role not in ROLES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {', '.join(ROLES)} before the colon")
    found: dict[str, Any] = {"role": role, "labels": {}}
    for setting in filter(None, rest.split(",")):
        name, value = _label(setting)
        if name.startswith("labels."):
            found["labels"][name.removeprefix("labels.")] = value
        elif name == "gpu_kind":
            found[name] = value
        elif name in ("cpus", "gpus", "memory_gib"):
            try:
                found[name] = float(value)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r}: {name} is no number") from None
        else:
            known = "cpus, gpus, memory_gib, gpu_kind, labels.NAME"
            raise argparse.ArgumentTypeError(f"{text!r}: {name!r} is none of {known}")
    return found


def _run(arguments: argparse.Namespace) -> int:
    """Submit the job, print its id, push its task files, and watch it if requested."""
    from palestra_control.control import ControlClient
    from palestra_service.commands.event_lines import show_events

    given, tasks = _config(arguments)
    with ControlClient(arguments.control) as control:
        job = control.submit(
            given,
            kind=arguments.kind,
            from_job=arguments.from_job,
            from_step=arguments.from_step,
            name=arguments.name,
            cpus=arguments.cpus,
            gpus=arguments.gpus,
            memory_gib=arguments.memory_gib,
            gpu_kind=arguments.gpu_kind,
            labels=dict(arguments.label),
            bundles=arguments.bundle,
            placement=arguments.placement,
            priority=arguments.priority,
            private=arguments.private,
            attached=arguments.attached,
            time_limit_seconds=arguments.time_limit,
        )
        say(job.job_id)
        if job.estimate is not None:
            say(f"estimate: {job.estimate}", file=sys.stderr)
        if tasks["train"] is not None:
            say("its tasks are pushed when it runs …", file=sys.stderr)
            with job.client() as client:
                client.push_tasks(tasks["train"], tasks["validation"] or ())
        return show_events(job) if arguments.watch else 0


def _config(arguments: argparse.Namespace) -> tuple[dict[str, Any] | None, dict[str, Path | None]]:
    """Return the configuration to submit, and its task files by split, which are pushed when the job runs."""
    from palestra.client.task_files import check_sizes, read_task_files
    from palestra.config import load_config

    tasks: dict[str, Path | None] = {"train": None, "validation": None}
    if arguments.config is None:
        if arguments.from_job is None or arguments.set:
            raise ConfigError("name a configuration (JOB.TOML); only with --from-job alone there need be none")
        return None, tasks
    settings = overrides(arguments.set)
    config = load_config(arguments.config, settings)
    if arguments.kind is not None and "kind" not in config.model_fields_set:
        config = load_config(arguments.config, settings | {"kind": arguments.kind})  # so that it is checked here
    files = read_task_files(config)
    check_sizes(files, config.server.max_body_bytes)
    tasks |= {split: file.path for split, file in files.items()}
    # Tasks and the run's folder are of this machine: the service has a folder of its own, and gets tasks as they are.
    given = config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude={"tasks", "run_dir"})
    return given, tasks
