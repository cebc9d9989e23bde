from __future__ import annotations

import pytest

from palestra.cli.main import main
from palestra.client.control import Job
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
    found = [ArtifactView(path=path, bytes=1, modified_at=0.0) for path in names]
    fetched = []
    monkeypatch.setattr(Job, "artifacts", lambda self: found)
    monkeypatch.setattr(Job, "download", lambda self, path, to: fetched.append(path))
    main(["export", "job-0000000000000000", str(tmp_path / "model"), "--control", "http://127.0.0.1:1"])
    assert fetched == ["config.toml", "checkpoints/step-1000000/w"]
