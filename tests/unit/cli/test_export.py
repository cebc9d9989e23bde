from __future__ import annotations

import pytest

from palestra.cli.main import main
from palestra.client.job import Job
from palestra.config import dump_config, parse_config
from palestra.errors import ConfigError
from palestra.runtime.run_dir import newest_of_run
from palestra.trainer import checkpoint
from palestra.types.control_wire import ArtifactView


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
    assert newest_of_run(str(tmp_path / "checkpoints" / "white")).endswith("white/step-000003")
    step = str(tmp_path / "checkpoints" / "white" / "step-000002")
    assert newest_of_run(step) == step
    with pytest.raises(ConfigError, match=r"its folder is .*checkpoints/white$"):  # no option that only export has
        newest_of_run(str(tmp_path))
    (tmp_path / "plain" / "checkpoints" / "white").mkdir(parents=True)
    assert newest_of_run(str(tmp_path / "plain" / "checkpoints" / "white")).endswith("plain/checkpoints/white")
