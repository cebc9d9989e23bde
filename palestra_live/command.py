"""`palestra live`: deletes what a subject has said in a live run, and names the versions that learned from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command
from palestra.terminal import say
from palestra_live.gate.command import ORDERS, obey, show_gate


def add_live(commands: Any) -> None:
    """Add the command `live`, which takes an action, the folder of a live run, and a subject."""
    parser = add_command(
        commands,
        "live",
        _run,
        "delete what a subject has said, list the versions trained on it, and direct the gate of a live run",
        "  palestra live forget runs/bot user-17\n"
        "  palestra live forget runs/bot user-17 --url http://127.0.0.1:8000   # while it runs\n"
        "  palestra live versions runs/bot user-17\n"
        "  palestra live status runs/bot                  # versions and decisions of the gate\n"
        "  palestra live promote runs/bot 12 --reason 'the hold is over'\n"
        "  palestra live back runs/bot --reason 'rude replies'   # also: hold, resume",
    )
    parser.add_argument("what", choices=["forget", "versions", "status", *ORDERS], help="what to do")
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of the run")
    parser.add_argument(
        "subject", metavar="WHICH", nargs="?", help="whose sessions, or which version to promote; the others go without"
    )
    parser.add_argument("--reason", metavar="TEXT", help="of an order to the gate, which records it; without it, none")
    parser.add_argument(
        "--url", metavar="URL", help="address of the run's server, if it runs; without it, its files are changed here"
    )


def _run(arguments: argparse.Namespace) -> int:
    """Do it, and print the versions one a line."""
    from palestra.errors import ConfigError, RunInUse
    from palestra.runtime.run_dir import is_running
    from palestra_live.forgetting import forget, sessions_of, trained_versions

    folder, subject = arguments.folder, arguments.subject
    if arguments.what == "status":
        return show_gate(folder)
    if arguments.what in ORDERS:
        return obey(folder, arguments.what, subject, arguments.reason)
    if subject is None:
        raise ConfigError(f"name the subject: palestra live {arguments.what} RUN SUBJECT")
    if arguments.url is None:
        check_own(folder)
    if arguments.what == "versions":
        versions = trained_versions(folder, subject)
    elif arguments.url is not None:
        count, versions = _ask(folder, subject, arguments.url)
        say(f"deleted {count} session{'s' * (count != 1)}")
    elif is_running(folder):
        raise RunInUse(f"the job in {folder} is running; name its address (--url), or stop it first")
    else:
        found = forget(folder, sessions_of(folder, subject), subject)
        versions = found.versions
        say(f"deleted {found.sessions} session{'s' * (found.sessions != 1)}")
    say("\n".join(versions) if versions else "no version was trained on them")
    return 0


def check_own(folder: Path) -> None:
    """Raise ConfigError for a run whose files another user could have made, or NotFound for no live run.

    Call it before this process opens the files: SQLite's locks end when any descriptor of a file is closed.
    """
    from palestra.database.sqlite import make_private
    from palestra.disk import check_folder
    from palestra.errors import NotFound
    from palestra_live.store import FILE

    for path in (folder / FILE, folder / "run.db"):
        if folder.is_dir():
            check_folder(folder)
        if not path.exists():
            raise NotFound(f"{path} is not there; name the folder of a live run")
        make_private(path)


def _ask(folder: Path, subject: str, url: str) -> tuple[int, list[str]]:
    """Have a running job delete a subject's sessions, and return their number and the versions."""
    import httpx2

    from palestra.disk import read_own
    from palestra.errors import ServerFailed
    from palestra.http_clients import http_client

    key = read_own(folder / "api_key").decode().strip()
    headers = {"Authorization": f"Bearer {key}"}
    try:
        with http_client(headers=headers, timeout=120) as client:
            answer = client.post(f"{url.rstrip('/')}/live/forget", json={"subject": subject})
    except httpx2.HTTPError as error:
        raise ServerFailed(f"{url} does not answer: {error}") from error
    if answer.status_code != 200:
        raise ServerFailed(f"{url} answered {answer.status_code}: {answer.text[:300]}")
    found = answer.json()
    return found["sessions"], found["versions"]
