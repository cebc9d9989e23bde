"""Install the harnesses that were tried into a folder, check each, and write docs/reference/harnesses.md.

`python scripts/harnesses.py FOLDER PAGE PYTHON`, as `make harnesses` does. What is installed there already stays.
pip's environments are made with PYTHON if there is such a program: openhands needs Python 3.12.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from palestra.errors import ConfigError
from palestra.terminal import say
from palestra_harness.checking import HarnessCheck, check_harness, counts_text, lines_of
from palestra_harness.harness import Harness, known_harnesses

TIMEOUT_SECONDS = 900.0  # of the first start of a program, on a busy machine
_HEADER = """# Harnesses that were tried

<!-- made by `make harnesses`; do not edit -->

`palestra harness check NAME` plays a scripted task of two turns with each program: the model calls a tool that writes a
file, and says that it is done. The table says how the programs speak, and nothing of how well they work. To train with
them: [harnesses](../how-to/harnesses.md).

- **refused**: calls that the server answers with 4xx. **ignored**: fields without effect.
- **forks**: calls that could not reuse the exact tokens of the call before.
- **first call**: its prompt, in tokens of SmolLM2. `NAME-lean` has few tools and a short system message.
- **not trained**: calls beside the task, such as for a title.
- **version**: as `--version` says, or else pip; empty: not recorded. Harnesses without a line have not been played.

| harness | version | plays | calls | first call | refused | ignored | forks | not trained |
|---|---|---|--:|--:|---|---|---|--:|
"""


def install(harness: Harness, folder: Path, python: str) -> None:
    """Install a harness as its `install` says, with its program in `folder`/bin.

    Raises:
        subprocess.CalledProcessError: npm or pip failed.
    """
    if (folder / "bin" / harness.command[0]).exists():
        return
    tool, *words = harness.install.split()
    if tool == "npm":
        subprocess.run(["npm", *words, "--prefix", str(folder), "--no-audit", "--no-fund"], check=True)
        return
    place = folder / harness.name
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    subprocess.run([str(place / "bin" / "pip"), "--quiet", *words], check=True)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / harness.command[0]).symlink_to(Path("..") / harness.name / "bin" / harness.command[0])


def package_version(harness: Harness, folder: Path) -> str:
    """Return the version of a harness's package in the environment that `install` made of it; empty: it has none."""
    name = harness.install.split()[-1].partition("==")[0]
    found = distributions(name=name, path=[str(path) for path in (folder / harness.name).glob("lib/*/site-packages")])
    return next((one.version for one in found), "")


def row(check: HarnessCheck, folder: Path) -> str:
    """Return the line of a harness in the table. `folder`: where it was installed."""
    plays = "yes" if check.speaks else "no"
    if check.unknown_fields == "ignore":
        plays += ', with `server.unknown_fields = "ignore"`'
    version = check.version or package_version(check.harness, folder)
    cells = (check.harness.name, version, plays, check.calls, f"{check.first_tokens:,}")
    more = (counts_text(check.refused), counts_text(check.ignored), counts_text(check.forks), check.untrained)
    return "| " + " | ".join(map(str, (*cells, *more))) + " |\n"


def main() -> int:
    """Install, check and write; return 1 if a harness does not play."""
    folder, page = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    python = shutil.which(sys.argv[3]) or sys.executable
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    checks = []
    for harness in known_harnesses().values():
        try:
            install(harness, folder, python)
        except subprocess.CalledProcessError as error:
            say(f"{harness.name} can't be installed: {error}", file=sys.stderr)
        try:
            checks.append(asyncio.run(check_harness(harness, TIMEOUT_SECONDS)))
        except ConfigError as error:
            say(str(error), file=sys.stderr)
            continue
        for line in lines_of(checks[-1]):
            say(line)
    page.write_text(_HEADER + "".join(row(check, folder) for check in checks), encoding="utf-8")
    return 0 if len(checks) == len(known_harnesses()) and all(check.speaks for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
