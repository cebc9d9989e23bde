from __future__ import annotations

import os

from palestra_service.ray.job_environment import job_environment, limit_environment

OPERATOR = {
    "PATH": "/bin",
    "HOME": "/root",
    "LC_ALL": "C",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "PALESTRA_API_KEY": "secret",
    "PALESTRA_KEY": "secret",
    "PGPASSWORD": "secret",
    "HF_TOKEN": "secret",
    "HTTPS_PROXY": "http://user:secret@proxy",
    "LD_PRELOAD": "secret",
    "PALESTRA_CACHE": "cache",
    "HF_HOME": "~/hub",
    "PYTHONPATH": os.pathsep.join(("here", "/there")),
}


def test_only_named_variables_pass_and_folders_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = job_environment(OPERATOR)
    assert found == {
        "PATH": "/bin",
        "HOME": "/root",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "PALESTRA_CACHE": str(tmp_path / "cache"),
        "HF_HOME": "~/hub",
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "here"), "/there")),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }


def test_the_operator_names_more():
    found = job_environment(OPERATOR, ("HF_TOKEN", "NOT_SET"))
    assert found["HF_TOKEN"] == "secret"
    assert not {"HF_HUB_DISABLE_IMPLICIT_TOKEN", "NOT_SET", "PGPASSWORD"} & found.keys()


def test_a_process_that_somebody_else_started_drops_the_rest():
    environment = dict(OPERATOR)
    limit_environment(environment, ("PGPASSWORD",))
    assert environment == job_environment(OPERATOR, ("PGPASSWORD",))
