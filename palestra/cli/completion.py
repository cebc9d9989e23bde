"""`palestra completion`: the shell script that completes commands, options and file names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command, commands_of
from palestra.terminal import say

SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Any) -> None:
    """Add the command `completion`, which takes the name of a shell."""
    parser = add_command(
        commands,
        "completion",
        _run,
        "print the script that completes commands and options in a shell",
        "  palestra completion bash\n\n"
        "to have it in every shell:\n"
        "  echo 'eval \"$(palestra completion bash)\"' >> ~/.bashrc\n"
        "  palestra completion zsh > ~/.zfunc/_palestra   # a folder of $fpath\n"
        "  palestra completion fish > ~/.config/fish/completions/palestra.fish",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")


def _run(arguments: argparse.Namespace) -> None:
    """Print the script, which contains every command of this version and starts no process."""
    import shtab

    # shtab is asked for files here and not where options are declared, so that no other command has to load it.
    top = arguments.parser
    for found in commands_of(top).values():
        for action in found._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads this attribute
    say(shtab.complete(top, shell=arguments.shell))
