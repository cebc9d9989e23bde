"""`palestra submit`: submits a job to the service, from a configuration or another job's result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command, add_control, add_set, overrides, time_span
from palestra.errors import ConfigError
from palestra.terminal import one_line, say

if TYPE_CHECKING:
    from palestra_control.job import Job

ROLES = ("engine", "trainer", "runner")
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {  # those that are fields of `ControlClient.submit`
    "kind": ({"choices": ("training", "inference")}, "train the model, or serve it; without it, what JOB.TOML says"),
    "from_job": ({"metavar": "JOB"}, "start from the weights of a job; without JOB.TOML, serve them"),
    "from_step": ({"metavar": "STEP", "type": int}, "step of the checkpoint of --from-job; without it, the newest"),
    "name": ({}, "name for people; without it, the configuration's"),
    "cpus": (
        {"metavar": "CORES", "type": float},
        "cores that the job holds while it runs; without it, 1, or 0.25 on a shared base",
    ),
    "gpus": (
        {"metavar": "GPUS", "type": float, "default": 0.0},
        "GPUs that the job holds: a part of one below 1, whole ones above",
    ),
    "memory_gib": (
        {"metavar": "GIB", "type": float, "default": 0.0},
        "memory that the job holds; a job that uses more is ended. 0: its share of the machine",
    ),
    "gpu_kind": ({"metavar": "KIND"}, "kind of GPU that its node has to have, such as H100; without it, any"),
    "placement": (
        {"choices": ("PACK", "STRICT_PACK", "SPREAD"), "default": "PACK"},
        "how its processes are placed: on few nodes, on one node, or on many",
    ),
    "priority": ({"choices": ("low", "normal", "high"), "default": "normal"}, "place in the tenant's queue"),
    "attached": ({"action": "store_true"}, "cancel the job when no client has asked for it for a while"),
}
LABEL = "a label that its node has to have; may be given several times"
BUNDLE = (
    "what each process of a role holds, perhaps on another node: engine:cpus=4,gpus=1 (docs/how-to/nodes.md); may be "
    "given several times: for engine, trainer and runner"
)
TIME_LIMIT = (
    "how long the job may run: 90m, 1.5h or 300 (seconds); then it saves and is cancelled. A job with a limit may "
    "start before larger ones that wait. Without it, any time"
)


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
    for name, (settings, what) in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=what, **settings)
    parser.add_argument("--label", metavar="NAME=VALUE", type=_label, action="append", default=[], help=LABEL)
    parser.add_argument("--bundle", metavar="ROLE:KEY=VALUE,…", type=_bundle, action="append", default=[], help=BUNDLE)
    parser.add_argument("--time-limit", metavar="TIME", type=time_span, help=TIME_LIMIT)
    parser.add_argument("--watch", action="store_true", help="show the job until it is over; Ctrl-C leaves it running")
    add_set(parser)
    add_control(parser)


def _label(text: str) -> tuple[str, str]:
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

    given, tasks = _config(arguments)
    with ControlClient(arguments.control) as control:
        fields = {name: getattr(arguments, name) for name in OPTIONS}
        fields |= {"labels": dict(arguments.label), "bundles": arguments.bundle}
        job = control.submit(given, **fields, time_limit_seconds=arguments.time_limit)
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


def show_events(job: Job) -> int:
    """Print a line for each event until the job is over; return 0 if it completed, 130 after Ctrl-C."""
    try:
        policy = trained_of_several(job.view().config)
        for event in job.events():
            if line := describe(event.kind, event.data, policy):
                say(line)
    except KeyboardInterrupt:
        say(f"\nthe job continues; see how it goes with: palestra top, palestra logs -f {job.job_id}")
        return 130
    return 0 if job.view().state == "completed" else 1


def trained_of_several(config: Mapping[str, Any]) -> str:
    """Return the name of the only policy that a job with several policies trains; empty otherwise."""
    from palestra.config.policy import not_frozen

    policies = config.get("policies") or {}
    trained = [str(name) for name in not_frozen(policies)]
    return trained[0] if len(policies) > 1 and len(trained) == 1 else ""


def describe(kind: str, data: Mapping[str, Any], policy: str) -> str:
    """Describe an event; empty: it is not printed. `policy`: whose reward a step has; empty: the only one's."""
    from palestra.types.states import LOSSES

    if kind == "state":
        return one_line(f"{data['state']}: {data['reason']}")
    if kind == "step":
        return _step(data, one_line(policy))
    if kind == "warning":
        return one_line(f"warning: {data['text']}")
    if kind in (*LOSSES, "tasks_grouped", "tasks_left_out", "estimate", "judge_doubtful", "version_quarantined"):
        return one_line(data["text"])
    if kind == "serving":
        return one_line(f"serving {data['model']}")
    if kind == "served":
        return one_line(f"served {data['calls']} calls")
    if kind == "saved":
        whose = "" if policy else data.get("policy", "")  # of several that are trained
        return one_line(f"{whose} saved after step {data['step']}".lstrip())
    return ""


def _step(row: Mapping[str, Any], policy: str) -> str:
    """Return the metrics of a step as a line; see `describe` for `policy`."""
    from palestra.types.metrics import of_policies, win_rate_words

    parts = [f"step {int(row['step']):>4}"]
    for own, mean in of_policies(row, "train/reward_mean").items():
        parts.append(f"{one_line(own) or policy} reward {mean:6.2f}".lstrip())
    for own, mean in of_policies(row, "validation/reward_mean").items():
        parts.append(f"{one_line(own)} validation {mean:5.2f}".lstrip())
    parts += filter(None, [win_rate_words(row)])
    if "time/step_seconds" in row:
        parts.append(f"{row['time/step_seconds']:6.1f} s")
    return "   ".join(parts)
