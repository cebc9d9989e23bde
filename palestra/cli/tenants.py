"""`palestra tenants`, for whoever runs the cluster."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from palestra.cli.options import add_control, command
from palestra.client.control import ControlClient
from palestra.errors import ConfigError
from palestra.terminal import say

AMOUNTS = {"cpus": "cores", "gpus": "GPUs", "memory_gib": "GiB of memory", "jobs": "jobs that run"}


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "tenants",
        run,
        "tenants of the cluster, and what each may hold",
        "  palestra tenants\n  palestra tenants add physics\n  palestra tenants quota physics --gpus 2 --jobs 5\n"
        "  palestra tenants quota physics --jobs none\n  palestra tenants quota physics --none\n"
        "  palestra tenants private on    # of your own tenant, by its admin: jobs that say nothing are private",
    )
    parser.add_argument("action", nargs="?", choices=("list", "add", "quota", "private"), default="list")
    parser.add_argument("name", nargs="?")
    for name, what in AMOUNTS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="N",
            type=_amount,
            default=argparse.SUPPRESS,
            help=f"{what} at the same time; `none`: no limit; not given: as before",
        )
    parser.add_argument("--none", action="store_true", help="no limits at all")
    add_control(parser)


def run(arguments: argparse.Namespace) -> None:
    """List, add, or set a quota."""
    if arguments.action != "list" and arguments.name is None:
        raise ConfigError(f"which one? palestra tenants {arguments.action} NAME")
    if arguments.action == "private" and arguments.name not in ("on", "off"):
        raise ConfigError("palestra tenants private on, or off")
    quota = {name: getattr(arguments, name) for name in AMOUNTS if hasattr(arguments, name)}
    if bool(quota or arguments.none) != (arguments.action == "quota") or (quota and arguments.none):
        raise ConfigError("a quota is set with `palestra tenants quota NAME --gpus N …`, or taken away with `--none`")
    with ControlClient(arguments.control) as control:
        if arguments.action == "list":
            for tenant in control.request("GET", "/tenants"):
                say(_line(tenant))
        elif arguments.action == "add":
            made = control.request("POST", "/tenants", json={"name": arguments.name})
            say(f"the key of {arguments.name}'s admin, shown this once:  {made['secret']}")
        elif arguments.action == "private":
            control.request("PATCH", "/tenant", json={"private_jobs": arguments.name == "on"})
        else:
            body = {"quota": dict.fromkeys(AMOUNTS) if arguments.none else quota}
            say(_line(control.request("PATCH", f"/tenants/{quote(arguments.name, safe='')}", json=body)))


def _line(tenant: dict[str, Any]) -> str:
    limits = [f"{name} {amount:g}" for name, amount in tenant["quota"].items() if amount is not None]
    return f"{tenant['name']:<20} {', '.join(limits) or 'no quota'}"


def _amount(text: str) -> float | None:
    """A number, or `none`."""
    return None if text == "none" else float(text)
