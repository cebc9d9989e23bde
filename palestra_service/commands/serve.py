"""`palestra serve`: the control plane, through which several users share a machine or a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command
from palestra.terminal import say

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "state-dir": (
        {"metavar": "DIR", "type": Path, "default": Path("palestra-state")},
        "folder of jobs and control store",
    ),
    "host": ({"default": "127.0.0.1"}, "address to listen on; TLS is a proxy's work"),
    "port": ({"type": int, "default": 7400}, "port to listen on; 0: any free one"),
    "database": (
        {"metavar": "URL"},
        "postgresql://…; without it, SQLite in the state directory. A password belongs into PGPASSWORD or ~/.pgpass, "
        "where no process list shows it",
    ),
    "ray-address": ({"metavar": "HOST:PORT"}, "address of a cluster to join; without it, a local one is started"),
    "cpus": ({"metavar": "CORES", "type": float}, "cores that a local cluster gives to jobs; without it, all"),
    "gpus": ({"metavar": "GPUS", "type": int}, "GPUs that a local cluster gives to jobs; without it, all"),
    "memory-gib": ({"metavar": "GIB", "type": float}, "memory that a local cluster gives to jobs; without it, all"),
    "rules": (
        {"metavar": "FILE", "type": Path},
        "TOML: the largest numbers of a job's configuration, and the models (docs/how-to/service-rules.md); without "
        "it, the caps of docs/reference/configuration.md",
    ),
    "pass-env": (
        {"metavar": "NAME", "action": "append", "default": []},
        "a variable of this process that jobs get, such as HF_TOKEN or HTTPS_PROXY (docs/how-to/service-rules.md has "
        "those that they get in any case); may be given several times",
    ),
    "new-admin-key": ({"action": "store_true"}, "print one more key of the first admin, for when all are lost"),
    "insecure-no-auth": (
        {"action": "store_true"},
        "ask for no keys: every program of this machine is the operator; loopback addresses only",
    ),
}


def add_serve(commands: Any) -> None:
    """Add the command `serve`, with options for address, storage, and the resources of jobs."""
    parser = add_command(
        commands,
        "serve",
        _run,
        "serve many users' jobs on this machine, or on a Ray cluster",
        "  palestra serve\n  palestra serve --ray-address 10.0.0.1:6379 --state-dir /shared/palestra --host 0.0.0.0",
    )
    for name, (settings, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", help=what, **settings)


def _run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; the first start prints the admin's key."""
    from palestra.http.server import run_on_uvloop
    from palestra.tracking.registry import check_trackers
    from palestra_service.jobs.rules import Rules, load_rules
    from palestra_service.ray.cluster import LocalRay
    from palestra_service.ray.serve import ServeOptions, serve_control

    options = ServeOptions(
        state_dir=arguments.state_dir,
        host=arguments.host,
        port=arguments.port,
        database=arguments.database,
        ray_address=arguments.ray_address,
        local=LocalRay(cpus=arguments.cpus, gpus=arguments.gpus, memory_gib=arguments.memory_gib),
        without_keys=arguments.insecure_no_auth,
        new_admin_key=arguments.new_admin_key,
        rules=Rules() if arguments.rules is None else load_rules(arguments.rules),
        pass_env=tuple(arguments.pass_env),
    )

    check_trackers(sorted(options.rules.trackers))
    for warning in options.rules.engines.warnings(options.pass_env, os.environ):
        say(f"palestra: {warning}", file=sys.stderr)

    hint = False

    def show_key(made: Any, unused: bool) -> None:
        nonlocal hint
        if arguments.insecure_no_auth:
            return
        if hint := made is not None:
            say(f"the admin's key, shown this once:  {made.secret}")
        elif unused:
            say("no key of the first admin was ever used; if it is lost, start once with --new-admin-key")

    def ready(url: str) -> None:
        say(f"control plane at {url}, its state in {arguments.state_dir}; the page is {url}/dashboard")
        if hint:
            say(f"on another terminal:  export PALESTRA_URL={url} PALESTRA_KEY=that key")

    run_on_uvloop(serve_control(options, ready, show_key))
    return 0
