from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.cli.main import main
from palestra.config import dump_config, parse_config
from palestra.errors import ConfigError, VersionQuarantined
from palestra.runtime.run_dir import weights_of_run
from palestra.runtime.starting_points import all_checkpoints, with_models
from palestra.trainer import checkpoint
from palestra.trainer.quarantine import Quarantine, write_quarantine
from palestra_control.job import Job
from palestra_control.wire import ArtifactView

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    "name", ["../stolen", "checkpoints/step-000001/../../../stolen", "/etc/stolen", "checkpoints/step-000001/.."]
)
def test_a_control_plane_that_names_files_outside_the_run_gets_nothing_written(name, tmp_path, monkeypatch, capsys):
    found = [ArtifactView(path=path, bytes=1, modified_at=0.0) for path in ("config.toml", name)]
    monkeypatch.setattr(Job, "artifacts", lambda self: found)
    monkeypatch.setattr(Job, "download", lambda self, path, to: pytest.fail(f"{path} was fetched"))
    command = ["export", "job-0000000000000000", str(tmp_path / "model"), "--control", "http://127.0.0.1:1"]
    assert main(command) == 2
    assert "outside the run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_of_a_job_the_checkpoint_of_the_largest_step_is_fetched(tmp_path, monkeypatch):
    names = ["config.toml", *(f"checkpoints/step-{step}/w" for step in ("000007", "999999", "1000000"))]
    assert fetched_of(names, {}, tmp_path, monkeypatch) == ["config.toml", "checkpoints/step-1000000/w"]


TWO = {"policies": {"white": {}, "black": {}}, "roles": {"opponent": "black"}}


def fetched_of(names, settings, tmp_path, monkeypatch, *options: str) -> list[str]:
    """What is downloaded of a job with these files."""
    fetched: list[str] = []

    def download(self, path, to):
        fetched.append(path)
        if path == "config.toml":
            to.write_text(dump_config(parse_config(settings)))

    monkeypatch.setattr(Job, "artifacts", lambda self: [ArtifactView(path=p, bytes=1, modified_at=0.0) for p in names])
    monkeypatch.setattr(Job, "download", download)
    where = ["--control", "http://127.0.0.1:1"]
    main(["export", "job-0000000000000000", str(tmp_path / "model"), *where, *options])
    return fetched


def test_of_a_job_with_several_policies_the_checkpoint_of_the_named_one_is_fetched(tmp_path, monkeypatch, capsys):
    names = ["config.toml", *(f"checkpoints/{p}/step-00000{n}/w" for p in ("white", "black") for n in (1, 2))]
    fetched = fetched_of(names, TWO, tmp_path, monkeypatch, "--policy", "black")
    assert fetched == ["config.toml", "checkpoints/black/step-000002/w"]
    assert fetched_of(names, TWO, tmp_path, monkeypatch) == ["config.toml"]
    assert "has trained 'white' and 'black', and a checkpoint is that of one" in capsys.readouterr().err


def run_of_two(folder) -> None:
    (folder / "run.db").touch()
    (folder / "config.toml").write_text(dump_config(parse_config(TWO)))
    for name, step in (("white", 2), ("white", 3), ("black", 2)):
        fill = lambda path, name=name: (path / "weights.txt").write_text(name)  # noqa: E731
        checkpoint.write(folder / "checkpoints" / name, step, fill, {"step": step}, keep=2)


def test_of_a_run_with_several_policies_one_is_named(tmp_path, capsys):
    run_of_two(tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "model"), "--policy", "black"]) == 0
    assert (tmp_path / "model" / "weights.txt").read_text() == "black"
    assert "after step 2" in capsys.readouterr().out
    assert main(["export", str(tmp_path), str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert "has trained 'white' and 'black'" in said
    assert "--policy white" in said
    assert main(["export", str(tmp_path), str(tmp_path / "other"), "--policy", "grey"]) == 2
    assert "has trained no policy 'grey'; it has trained 'white' and 'black'" in capsys.readouterr().err


def test_a_run_with_several_policies_is_a_model_by_the_folder_of_one(tmp_path):
    run_of_two(tmp_path)
    assert weights_of_run(str(tmp_path / "checkpoints" / "white")).endswith("white/step-000003")
    step = str(tmp_path / "checkpoints" / "white" / "step-000002")
    assert weights_of_run(step) == step
    with pytest.raises(ConfigError, match="checkpoints/white"):  # no option that only export has
        weights_of_run(str(tmp_path))
    (tmp_path / "plain" / "checkpoints" / "white").mkdir(parents=True)
    assert weights_of_run(str(tmp_path / "plain" / "checkpoints" / "white")).endswith("plain/checkpoints/white")


def test_of_a_run_that_learned_rewards_their_model_is_exported_and_no_policy_is_played(tmp_path, capsys):
    def fill(path):
        (path / "weights.txt").write_text("policy")
        (path / "reward_model").mkdir()
        (path / "reward_model" / "weights.txt").write_text("rewards")

    (tmp_path / "run.db").touch()
    (tmp_path / "config.toml").write_text(dump_config(parse_config({"algorithm": {"name": "reward_model"}})))
    checkpoint.write(tmp_path / "checkpoints", 4, fill, {"step": 4}, keep=1)
    assert main(["export", str(tmp_path), str(tmp_path / "rewards")]) == 0
    assert (tmp_path / "rewards" / "weights.txt").read_text() == "rewards"
    assert "the reward model after step 4" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"trained a.*model"):
        weights_of_run(str(tmp_path))
    step = str(tmp_path / "checkpoints" / "step-000004")
    assert weights_of_run(step) == step, "who names the step means its policy"


def best_of(folder) -> None:
    """A run with checkpoints of steps 2 and 3, of which an earlier one, 1, validated best."""
    (folder / "run.db").touch()
    (folder / "config.toml").write_text(dump_config(parse_config({})))
    checkpoints = folder / "checkpoints"
    for step in (2, 3):
        checkpoint.write(checkpoints, step, lambda path, n=step: weights(path, n), {"step": step}, keep=2)
    checkpoint.write_weights_folder(checkpoints / checkpoint.BEST, 1, lambda path: weights(path, 1), {})


def weights(folder, number: int) -> None:
    save_file({"w": torch.full((2, 2), float(number))}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"dtype": "float32"}')
    for file in folder.iterdir():
        file.chmod(0o600)


@pytest.mark.parametrize(
    ("options", "step"),
    [((), 1), (("--step", "1"), 1), (("--step", "3"), 3), (("--step", "2", "--dtype", "bfloat16"), 2)],
)
def test_the_weights_that_validated_best_are_exported_or_those_of_a_step(options, step, tmp_path, capsys):
    best_of(tmp_path)
    evaluated = with_models(parse_config({}), str(tmp_path)).policies["policy"].model
    assert evaluated == weights_of_run(str(tmp_path)) == str(tmp_path / "checkpoints" / "best")
    mask = os.umask(0o027)
    try:
        assert main(["export", str(tmp_path), str(tmp_path / "model"), *options]) == 0
    finally:
        os.umask(mask)
    said = capsys.readouterr().out
    assert f"after step {step}" in said
    assert ("validated best" in said) == (options == ())
    found = load_file(tmp_path / "model" / "model.safetensors")["w"]
    wanted = "bfloat16" if "bfloat16" in options else "float32"
    assert (found.dtype, found[0, 0].item()) == (getattr(torch, wanted), step)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == {"dtype": wanted}
    modes = {entry.stat().st_mode & 0o777 for entry in (tmp_path / "model").iterdir()}
    assert (modes, (tmp_path / "model").stat().st_mode & 0o777) == ({0o640}, 0o750)


def test_a_step_without_a_checkpoint_is_refused_with_those_that_there_are(tmp_path, capsys):
    best_of(tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "model"), "--step", "7"]) == 2
    assert "has no weights of step 7; it has those of 1, 2, 3" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "wanted"), [((), "best"), (("--step", "2"), "step-000002")])
def test_of_a_job_the_best_weights_are_fetched(options, wanted, tmp_path, monkeypatch):
    names = ["config.toml", *(f"checkpoints/{name}/w" for name in ("best", "step-000002", "step-000003"))]
    assert fetched_of(names, {}, tmp_path, monkeypatch, *options) == ["config.toml", f"checkpoints/{wanted}/w"]


@pytest.mark.parametrize(
    ("since", "options", "from_where", "code"),
    [
        (3, (), {"best"}, 0),
        (1, (), set(), 2),
        (3, ("--step", "2"), {"step-000002"}, 0),
        (3, ("--step", "3"), {"best"}, 2),  # which may be of this step
        (1, ("--step", "3", "--force"), {"step-000003"}, 0),
        (1, ("--force",), {"best"}, 0),
    ],
)
def test_of_a_job_nothing_is_fetched_that_an_audit_holds_back(
    since, options, from_where, code, tmp_path, monkeypatch, capsys
):
    best_of(tmp_path)
    write_quarantine(tmp_path / "checkpoints", Quarantine(since=since, step=4, reason="the reward is gamed"))
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]

    def download(self, path, to):
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / path, to)
        fetched.append(path)

    fetched: list[str] = []
    monkeypatch.setattr(Job, "artifacts", lambda self: [ArtifactView(path=p, bytes=1, modified_at=0.0) for p in files])
    monkeypatch.setattr(Job, "download", download)
    where = ["--control", "http://127.0.0.1:1"]
    assert main(["export", "job-0000000000000000", str(tmp_path / "out" / "model"), *where, *options]) == code
    assert {Path(path).parent.name for path in fetched if path.endswith(".safetensors")} == from_where
    assert ("quarantined since step" in capsys.readouterr().err) == (code == 2)


def test_what_an_audit_holds_back_is_exported_with_force_only(tmp_path, capsys):
    best_of(tmp_path)
    write_quarantine(tmp_path / "checkpoints", Quarantine(since=3, step=4, reason="the reward is gamed"))
    assert main(["export", str(tmp_path), str(tmp_path / "model"), "--step", "3"]) == 2
    assert "quarantined since step 3" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "model"), "--step", "3", "--force"]) == 0
    assert weights_of_run(str(tmp_path)) == str(tmp_path / "checkpoints" / "best")  # of step 1
    write_quarantine(tmp_path / "checkpoints", Quarantine(since=1, step=4, reason="the reward is gamed"))
    with pytest.raises(VersionQuarantined):
        weights_of_run(str(tmp_path))
    checkpoint.write_weights_folder(tmp_path / "checkpoints" / checkpoint.BEST, 3, lambda path: weights(path, 3), {})
    write_quarantine(tmp_path / "checkpoints", Quarantine(since=3, step=4, reason="the reward is gamed"))
    assert weights_of_run(str(tmp_path)) == str(tmp_path / "checkpoints" / "step-000002")
    assert list(all_checkpoints(parse_config({}), tmp_path)) == ["policy@step-2"]  # of the chat playground
