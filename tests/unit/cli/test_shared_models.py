"""Options of servers of base models that can't be used, or that belong to what is not served."""

from __future__ import annotations

import contextlib

import pytest

from palestra.cli.main import main
from palestra.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["base", "tiny-random", "--max-models", "3"], "--max-models is of the Tinker API, which is served with"),
        (["base", "tiny-random", "--adapter", "a=b"], "--adapter is of the Tinker API"),
        (["base", "tiny-random", "--loaded-adapters", "0"], "--loaded-adapters is 0, and has to be at least 1"),
        (["base", "tiny-random", "--tinker-port", "0", "--checkpoint-steps", "0"], "--checkpoint-steps is 0"),
        (["tinker", "tiny-random", "--slots", "-1"], "--slots is -1"),
        (["tinker", "tiny-random", "--adapter", "a="], "--adapter takes NAME=FOLDER"),
    ],
)
def test_an_option_that_can_not_be_used_is_refused_in_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_model_reach_the_server_of_a_base(monkeypatch):
    served = []

    @contextlib.asynccontextmanager
    async def serve(options):
        served.append(options.shared)
        raise ConfigError("it need not serve")
        yield

    monkeypatch.setattr("palestra_bases.serving.base_server", serve)
    monkeypatch.setattr("palestra.models.device.tune_malloc", lambda: None)
    assert main(["base", "tiny-random", "--slots", "2", "--loaded-adapters", "3", "--threads", "1"]) == 2
    (shared,) = served
    assert (shared.slots, shared.loaded_adapters, shared.engine.threads, shared.trainer.threads) == (2, 3, 1, 1)
