"""`palestra export`: copies the trained model into a folder that transformers loads."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from palestra.cli.options import JOB_ID, RUN, add_command, add_control, run_folder
from palestra.errors import Conflict
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra_control.job import Job

DTYPES = ("float32", "bfloat16", "float16")
OPTION = "--policy"  # names the policy whose checkpoint is copied


def add_export(commands: Any) -> None:
    """Add the command `export`, which takes a run or a job, and a folder to write."""
    parser = add_command(
        commands,
        "export",
        _run,
        "copy the weights of a run that validated best, or else its newest, to a folder that transformers loads",
        "  palestra export runs/addition my-model\n  palestra export job-1f3a5c7e9b2d4f60 my-model\n"
        "  palestra export runs/duel my-model --policy white   # of several policies that the run has trained\n"
        "  palestra export runs/addition my-model --merged     # an adapter as whole weights\n"
        "  palestra export runs/addition my-model --step 30 --dtype bfloat16",
    )
    parser.add_argument("source", metavar="RUN", help=RUN)
    parser.add_argument("target", metavar="DIR", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        OPTION,
        metavar="NAME",
        help="whose checkpoint; without it, that of the only policy that the run has trained",
    )
    parser.add_argument(
        "--step",
        metavar="STEP",
        type=int,
        help="of the checkpoint; without it, the one that validated best, or else the newest",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="write whole weights, to which the adapter is added; without it an adapter is copied as it is",
    )
    parser.add_argument(
        "--force", action="store_true", help="also weights that an audit holds back, because the reward was gamed"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="round the weights to this precision; without it, they are those of training"
    )
    add_control(parser)


def _run(arguments: argparse.Namespace) -> None:
    """Copy a checkpoint after checking its hashes; a job's is first downloaded from the service."""
    if JOB_ID.fullmatch(arguments.source) is None:
        _copy(Path(arguments.source), arguments)
        return
    from palestra_control.control import ControlClient

    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    with ControlClient(arguments.control) as control, TemporaryDirectory(dir=arguments.target.parent) as folder:
        job = control.job(arguments.source)
        places = {artifact.path: artifact.place_in(Path(folder)) for artifact in job.artifacts()}
        (Path(folder) / "run.db").touch()  # `run_folder` knows the folder of a run by this file
        job.download("config.toml", places["config.toml"])
        chosen = _chosen_of(job, places, Path(folder), arguments)
        for path, place in places.items():
            if chosen is not None and path.startswith(f"{chosen}/"):
                job.download(path, place)
        _copy(Path(folder), arguments)


def _chosen_of(job: Job, places: Mapping[str, Path], run_dir: Path, arguments: argparse.Namespace) -> str | None:
    """Return the path of a policy's best, newest or a step's weights; None: not found, or held back by an audit."""
    from palestra.runtime.run_dir import checkpoints_of_run
    from palestra.trainer.checkpoint import BEST, INDEX, newest_name
    from palestra.trainer.quarantine import FILE, read_quarantine

    checkpoints, step = checkpoints_of_run(run_dir, arguments.policy, OPTION), arguments.step
    below = f"{checkpoints.relative_to(run_dir)}/"
    names = {path.removeprefix(below).split("/")[0] for path in places if path.startswith(below)}
    if below + FILE in places and not arguments.force:
        job.download(below + FILE, places[below + FILE])
        if (held := read_quarantine(checkpoints)) is not None:
            names = {name for name in names if not (name[5:].isdecimal() and held.holds(int(name[5:])))}
            if (index := places.get(f"{below}{BEST}/{INDEX}")) is not None:
                job.download(f"{below}{BEST}/{INDEX}", index)
                names -= {BEST} if held.holds(int(json.loads(index.read_bytes())["step"])) else set()
                index.unlink()  # a folder with nothing else is damaged
    wanted = [BEST] if step is None else [f"step-{step:06d}", BEST]  # `best` may be of this step
    chosen = next((name for name in wanted if name in names), newest_name(names) if step is None else None)
    return None if chosen is None else below + chosen


def _copy(run_dir: Path, arguments: argparse.Namespace) -> None:
    """Copy the chosen checkpoint without the files that only a trainer reads."""
    from palestra.runtime.run_dir import weights_of_policy
    from palestra.trainer.checkpoint import BEST, FOLDER_OF_REWARDS, NOT_THE_MODEL

    folder, _ = run_folder(run_dir)
    target = arguments.target
    path, step = weights_of_policy(folder, arguments.policy, OPTION, arguments.step, arguments.force)
    if (path / FOLDER_OF_REWARDS).is_dir():  # of a run whose policy has not been trained
        path /= FOLDER_OF_REWARDS
    if target.exists():
        raise Conflict(f"{target} exists already; choose another folder")
    # The names of adapters' files are looked at without torch, whose import takes seconds.
    if not (path / "adapter_config.json").is_file():
        kind = "reward model" if path.name == FOLDER_OF_REWARDS else "model"
    elif arguments.merged:
        kind = "model, with its adapter merged,"
        _merge(path, target)
    else:
        kind = f"adapter of {json.loads((path / 'adapter_config.json').read_bytes())['base_model_name_or_path']}"
    if not target.exists():
        shutil.copytree(path, target, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
    if arguments.dtype is not None:
        _round(target, arguments.dtype)
    _make_readable(target)
    why = ", which validated best" if path.name == BEST and arguments.step is None else ""
    say(f"{target}: the {kind} after step {step}{why}")


def _round(folder: Path, dtype: str) -> None:
    """Round all weights of a model's folder, and have its configuration say so."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        rounded = {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(rounded, file, metadata={"format": "pt"})
    config = folder / "config.json"
    if config.is_file():
        found = json.loads(config.read_bytes())
        found |= dict.fromkeys(found.keys() & {"dtype", "torch_dtype"} or {"dtype"}, dtype)
        config.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _make_readable(folder: Path) -> None:
    """Give a folder and its files default permissions: a run's files are private to their owner."""
    os.umask(mask := os.umask(0))
    for entry in (folder, *folder.rglob("*")):
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~mask)


def _merge(checkpoint: Path, target: Path) -> None:
    """Write the whole weights of an adapter's checkpoint, in float32, and its tokenizer into a new folder."""
    import torch

    from palestra.models.causal_lm import load_causal_lm, load_tokenizer

    model = load_causal_lm(str(checkpoint), torch.float32)
    target.mkdir(parents=True)
    model.save(target, load_tokenizer(str(checkpoint)))
