"""`palestra export`: the trained model as a folder of its own, which transformers loads."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from palestra.cli.options import add_control, command, run_folder
from palestra.errors import Conflict
from palestra.terminal import say

JOB_ID = re.compile(r"job-[0-9a-f]{16}")
OPTION = "--policy"  # names the policy whose checkpoint is copied


def add(commands: Any) -> None:
    """Add the command `export`, which takes a run or a job, and a folder to write."""
    parser = command(
        commands,
        "export",
        run,
        "copy a run's newest good checkpoint to a folder that transformers loads",
        "  palestra export runs/addition my-model\n  palestra export job-1f3a5c7e9b2d4f60 my-model\n"
        "  palestra export runs/duel my-model --policy white   # of several policies that the run has trained\n"
        "  palestra export runs/addition my-model --merged     # an adapter as whole weights",
    )
    parser.add_argument("source", metavar="RUN", help="the run's folder, or a job of a control plane by its id")
    parser.add_argument("target", metavar="DIR", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        OPTION,
        metavar="NAME",
        help="whose checkpoint; without it, that of the only policy that the run has trained",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="write whole float32 weights, to which the adapter is added; without it an adapter is copied as it is",
    )
    add_control(parser)


def run(arguments: argparse.Namespace) -> None:
    """Copy the newest checkpoint whose files have their hashes; that of a job is fetched from the service first."""
    if JOB_ID.fullmatch(arguments.source) is None:
        _copy(Path(arguments.source), arguments.policy, arguments.target, arguments.merged)
        return
    from palestra.client.control import ControlClient

    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    with ControlClient(arguments.control) as control, TemporaryDirectory(dir=arguments.target.parent) as folder:
        job = control.job(arguments.source)
        places = {artifact.path: artifact.place_in(Path(folder)) for artifact in job.artifacts()}
        (Path(folder) / "run.db").touch()  # `run_folder` knows the folder of a run by this file
        job.download("config.toml", places["config.toml"])
        newest = _newest_of(Path(folder), arguments.policy, places)
        for path, place in places.items():
            if newest is not None and path.startswith(f"{newest}/"):
                job.download(path, place)
        _copy(Path(folder), arguments.policy, arguments.target, arguments.merged)


def _newest_of(run_dir: Path, policy: str | None, paths: Iterable[str]) -> str | None:
    """Return the newest checkpoint of a policy among the files of a job, as the path of its folder; None: it has none.

    Args:
        run_dir: has the job's configuration.
        policy: by name; None: the only one that is trained.
        paths: of all files of the job's run.

    Raises:
        ConfigError: the job trains no such policy, or several and none is named.
    """
    from palestra.runtime.run_dir import checkpoints_of_run
    from palestra.trainer.checkpoint import newest_name

    below = f"{checkpoints_of_run(run_dir, policy, OPTION).relative_to(run_dir)}/"
    newest = newest_name(path.removeprefix(below).split("/")[0] for path in paths if path.startswith(below))
    return None if newest is None else below + newest


def _copy(run_dir: Path, policy: str | None, target: Path, merged: bool) -> None:
    """Copy the newest good checkpoint without the files that only a trainer reads."""
    from palestra.runtime.run_dir import newest_of_policy
    from palestra.trainer.checkpoint import NOT_THE_MODEL

    folder, _ = run_folder(run_dir)
    path, state = newest_of_policy(folder, policy, OPTION)
    if target.exists():
        raise Conflict(f"{target} exists already; choose another folder")
    # The names of adapters' files are looked at without torch, whose import takes seconds.
    if not (path / "adapter_config.json").is_file():
        kind = "model"
    elif merged:
        kind = "model, with its adapter merged,"
        _merge(path, target)
    else:
        kind = f"adapter of {json.loads((path / 'adapter_config.json').read_bytes())['base_model_name_or_path']}"
    if not target.exists():
        shutil.copytree(path, target, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
    say(f"{target}: the {kind} after step {state['step']}")


def _merge(checkpoint: Path, target: Path) -> None:
    """Write the whole weights of an adapter's checkpoint, float32, and its tokenizer into a new folder."""
    import torch

    from palestra.models.causal_lm import load_causal_lm, load_tokenizer

    model = load_causal_lm(str(checkpoint), torch.float32)
    target.mkdir(parents=True)
    model.save(target, load_tokenizer(str(checkpoint)))
