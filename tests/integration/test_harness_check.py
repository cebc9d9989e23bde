"""`palestra harness check`: what it says of programs that play, that are refused, that edit, and that do nothing."""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.errors import ConfigError
from palestra_harness import Harness, checking
from palestra_harness import harness as harnesses
from palestra_harness.checking import HarnessCheck, check_harness, installed_version, lines_of

AGENT = Path(__file__).parents[1] / "unit" / "harness" / "agent.py"


def agent(folder: Path, **fields) -> Harness:
    """The agent as an installed program, with these fields in its calls."""
    program = folder / "agent"
    program.write_text(f"#!{sys.executable}\n{AGENT.read_text()}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return Harness(
        name="agent",
        command=(str(program), "{base_url}", "{task}", json.dumps(fields)),
        variables={"KEY": "{api_key}", "MODEL": "{model}"},
        tried="1.2.3",
        install="copy it",
    )


@pytest.mark.slow
async def test_a_program_that_plays_has_its_tokens_counted_and_forks_nowhere(tmp_path):
    found = await check_harness(agent(tmp_path))
    assert found.speaks, lines_of(found)
    assert (found.calls, found.version, found.unknown_fields) == (2, "1.2.3", "refuse")
    assert (dict(found.refused), dict(found.ignored), dict(found.forks)) == ({}, {}, {})
    assert 100 < found.first_tokens < 3000
    assert not any("tried was" in line for line in lines_of(found))


async def test_the_lease_of_an_episode_lasts_longer_than_its_program_may_run(monkeypatch):
    leases, serve = [], checking.local_job

    def noting(config, *arguments, **settings):
        leases.append(config.rollout.lease_seconds)
        return serve(config, *arguments, **settings)

    monkeypatch.setattr(checking, "local_job", noting)
    await check_harness(Harness(name="idle", command=("true",)), timeout_seconds=400.0)
    assert leases[0] > 400


@pytest.mark.slow
async def test_a_program_that_edits_its_history_forks(tmp_path):
    found = await check_harness(agent(tmp_path, edits=True))
    assert found.speaks
    assert found.forks == {"edited_message": 1}


@pytest.mark.slow
async def test_a_field_that_is_not_known_is_ignored_in_a_second_run(tmp_path):
    found = await check_harness(agent(tmp_path, strange_field=1))
    assert found.speaks, lines_of(found)
    assert found.unknown_fields == "ignore"
    assert found.ignored == {"strange_field": 2}


@pytest.mark.slow
async def test_a_program_that_is_refused_can_not_speak(tmp_path):
    found = await check_harness(agent(tmp_path, top_p=0.5))
    assert not found.speaks
    assert list(found.refused) == ["unsupported_field top_p"]
    assert found.calls == 0


@pytest.mark.slow
async def test_a_program_that_asks_nothing_does_not_play():
    found = await check_harness(Harness(name="idle", command=(sys.executable, "-c", "print('no model for me')")))
    assert not found.speaks
    assert found.failure is not None
    assert "no model for me" in found.failure


def test_another_version_than_the_tried_one_is_named():
    harness = Harness(name="own", command=("own",), tried="1.2.3")
    assert "tried was 1.2.3" in lines_of(HarnessCheck(harness=harness, version="1.3.0"))[0]


def test_a_version_is_that_of_the_program():
    assert installed_version(Harness(name="own", command=(sys.executable,))) == platform.python_version()
    with pytest.raises(ConfigError):
        installed_version(Harness(name="own", command=("no-such-program",)))


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "code"), [({}, 0), ({"top_p": 0.5}, 1)])
def test_the_exit_code_says_whether_it_plays(tmp_path, monkeypatch, capsys, fields, code):
    monkeypatch.setattr(harnesses, "find_harness", lambda name: agent(tmp_path, **fields))
    assert main(["harness", "check", "agent"]) == code
    assert "agent 1.2.3" in capsys.readouterr().out


def test_a_program_that_is_not_installed_says_how(monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.defpath)
    assert main(["harness", "check", "pi"]) == 2
    assert "npm install" in capsys.readouterr().err
