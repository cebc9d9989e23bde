"""`palestra submit`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from palestra.cli.options import add_control, add_set, command, overrides, time_span
from palestra.client.control import ControlClient
from palestra.config import load_config
from palestra.errors import ConfigError
from palestra.terminal import say


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "submit",
        run,
        "submit a job to a control plane (palestra serve)",
        "  palestra submit recipes/addition.toml --gpus 0.5 --watch\n"
        "  palestra submit --from-job job-1f3a5c7e9b2d4f60   # serve what it has trained",
    )
    parser.add_argument(
        "config", type=Path, nargs="?", help="the job, in TOML (docs/configuration.md); without it, that of --from-job"
    )
    parser.add_argument(
        "--kind", choices=("training", "inference"), help="train the model, or serve it; without it, what CONFIG says"
    )
    parser.add_argument("--from-job", metavar="JOB", help="start from the weights of a job; without CONFIG, serve them")
    parser.add_argument("--from-step", metavar="N", type=int, help="of its checkpoint; without it, the newest")
    parser.add_argument("--name", help="for people; without it, the configuration's")
    parser.add_argument("--cpus", type=float, default=1.0, help="cores that it holds while it runs (default 1)")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs; a part of one below 1, whole ones above")
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=0.0,
        help="memory; a job that uses more is ended. 0: its share of the machine",
    )
    parser.add_argument(
        "--time-limit",
        metavar="TIME",
        type=time_span,
        help="how long it may run: 90m, 1.5h or 300 (seconds); then it saves and is cancelled. A job with a limit may "
        "start before larger ones that wait",
    )
    parser.add_argument("--priority", choices=("low", "normal", "high"), default="normal")
    parser.add_argument(
        "--private",
        action=argparse.BooleanOptionalAction,
        help="only you and the admins of your tenant see it (without it, what these have decided)",
    )
    parser.add_argument("--attached", action="store_true", help="cancel it when nobody has asked for it for a while")
    parser.add_argument("--watch", action="store_true", help="show it until it is over; Ctrl-C leaves it running")
    add_set(parser)
    add_control(parser)


def run(arguments: argparse.Namespace) -> int:
    """Submit, and print the job's id."""
    from palestra.cli.watch import show

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
            priority=arguments.priority,
            private=arguments.private,
            attached=arguments.attached,
            time_limit_seconds=arguments.time_limit,
        )
        say(job.job_id)
        if tasks["train"]:
            say("its tasks are pushed when it runs …", file=sys.stderr)
            with job.client() as client:
                client.push_tasks(tasks["train"], tasks["validation"])
        return show(job) if arguments.watch else 0


def _config(arguments: argparse.Namespace) -> tuple[dict[str, Any] | None, dict[str, list[dict[str, Any]]]]:
    """What is submitted as the configuration, and the tasks of its files, by split, that are pushed when it runs."""
    from palestra.cluster.tasks import check_sizes, read_files

    tasks: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    if arguments.config is None:
        if arguments.from_job is None or arguments.set:
            raise ConfigError("name a configuration (CONFIG); only with --from-job alone there need be none")
        return None, tasks
    settings = overrides(arguments.set)
    config = load_config(arguments.config, settings)
    if arguments.kind is not None and "kind" not in config.model_fields_set:
        config = load_config(arguments.config, settings | {"kind": arguments.kind})  # so that it is checked here
    files = read_files(config)
    check_sizes(files, config.server.max_body_bytes)
    for split, (_, found) in files.items():
        tasks[split] = [{"id": task.task_id, **task.data} for task in found]
    given = config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude={"tasks", "run_dir"})
    return given, tasks
