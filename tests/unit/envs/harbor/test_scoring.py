"""Rewards of a verifier: what counts, what fails the episode in place of a reward of 0, and what a forger gets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from palestra.envs import catalog_entry
from palestra.envs.concurrent import SerialEnvironment
from palestra.errors import (
    ConfigError,
    EnvironmentFailed,
    EpisodeForfeited,
    InvalidEnvironment,
    InvalidRequest,
    PayloadTooLarge,
)
from palestra.sandbox import Finished
from palestra.types.messages import text_message
from palestra_worlds.harbor import BoxRules, HarborEnvironment, boxes, catalog
from palestra_worlds.harbor.catalog import check_harbor
from palestra_worlds.harbor.scoring import read_rewards
from unit.envs.harbor.tasks import CLOSED, MemoryBox, in_memory, write_task, writes
from unit.envs.playing import calls

TASK = {"id": "t"}
FINISH = calls(("finish", {"answer": "done"}))


def test_named_rewards_come_before_the_plain_one():
    both = {"reward.json": b'{"reward": 1, "style": 0.25, "fine": true}', "reward.txt": b"7"}
    assert read_rewards(both) == {"reward": 1.0, "style": 0.25, "fine": 1.0}
    assert read_rewards({"reward.txt": b" 0.5\n"}) == {"reward": 0.5}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"ctrf.json": b"{}"},
        *({"reward.txt": text} for text in (b"", b"nan", b"inf", b"one", b"\xff", b"1 2", b"0" * 2**17)),
        *(
            {"reward.json": text, "reward.txt": b"1"}
            for text in (
                *(b"", b"{}", b"1", b"[1]", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "1"}', b'{"a": null}', b"\xff"),
                *(b'{"\\n": 1}', b"[" * 60_000, b'{"a": 1' + b"0" * 400 + b"}", b" " * 2**17),
            )
        ),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(files):
    with pytest.raises(ValueError, match="verifier wrote") as found:
        read_rewards(files)
    assert len(str(found.value)) < 400


async def played(environment, *actions):
    """The last step of an episode."""
    await environment.reset(TASK)
    try:
        for action in (*actions, FINISH):
            found = await environment.step_message(action)
        return found
    finally:
        await environment.close()


async def test_the_agents_own_reward_file_does_not_count(tmp_path, monkeypatch):
    write_task(tmp_path / "t")
    opened = in_memory(monkeypatch, lambda box: None)
    environment = HarborEnvironment(tmp_path)
    await environment.reset(TASK)
    opened[0].files |= {"/logs/verifier/reward.json": b'{"reward": 1}', "/tests/test.sh": b"mine"}
    with pytest.raises(EnvironmentFailed, match=r"wrote.*reward"):
        await environment.step_message(FINISH)
    assert opened[0].files["/tests/test.sh"] == b"#!/bin/sh\n"
    assert "stop" in opened[0].done
    await environment.close()
    assert opened[0].done[-1] == "close"


async def test_rewards_come_by_name_and_the_output_for_people(tmp_path, monkeypatch):
    write_task(tmp_path / "t", f'{CLOSED}[verifier]\nenv = {{MODE = "strict"}}\n')
    opened = in_memory(monkeypatch, writes(reward_json='{"right": 1, "short": 0.5}'))
    _, reward, over, cut_off, info = await played(HarborEnvironment(tmp_path))
    assert (reward, over, cut_off, info) == ({"right": 1.0, "short": 0.5}, True, False, {"verifier": "tested"})
    assert opened[0].variables == {"MODE": "strict"}


async def test_an_episode_that_is_cut_off_is_verified(tmp_path, monkeypatch):
    write_task(tmp_path / "t")
    in_memory(monkeypatch, writes(reward_txt="0.25"))
    environment = HarborEnvironment(tmp_path, max_steps=1)
    await environment.reset(TASK)
    found = await environment.step_message(calls(("shell", {"command": "ls"})))
    assert found[1:4] == ({"reward": 0.25}, False, True)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (Finished(code=3, output=b"no pytest", errors=b""), r"3.*pytest"),
        (Finished(code=137, output=b"", errors=b"", timed_out=True), "600"),
    ],
)
async def test_a_verifier_that_fails_fails_the_episode(tmp_path, monkeypatch, end, words):
    write_task(tmp_path / "t")
    in_memory(monkeypatch, lambda box: end)
    with pytest.raises(EnvironmentFailed, match=words):
        await played(HarborEnvironment(tmp_path))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("how", ["no reward", "too slow", "not writable", "large artifact"])
async def test_a_failure_that_the_agents_commands_may_have_caused_is_its_loss(tmp_path, monkeypatch, how, separate):
    mode = '[verifier]\nenvironment_mode = "separate"\n' if separate else ""
    write_task(tmp_path / "t", CLOSED + mode)
    slow = Finished(code=137, output=b"", errors=b"", timed_out=True)
    opened = in_memory(monkeypatch, lambda box: slow if how == "too slow" else None)

    async def refuse(self, *_):
        raise PayloadTooLarge("full") if how == "large artifact" else InvalidRequest("a file is there")

    if how in ("not writable", "large artifact"):
        monkeypatch.setattr(MemoryBox, "get" if how == "large artifact" else "put", refuse)
    with pytest.raises(EnvironmentFailed):  # without a command, it is the environment's
        await played(HarborEnvironment(tmp_path))
    with pytest.raises(EpisodeForfeited):
        await played(HarborEnvironment(tmp_path), calls(("shell", {"command": "ls"})))
    environment = HarborEnvironment(tmp_path)
    await environment.reset(TASK)
    await environment.step_message(calls(("shell", {"command": "ls"})))
    await environment.reset(TASK)  # the next episode begins without commands
    with pytest.raises(EnvironmentFailed):
        await environment.step_message(FINISH)
    await environment.close()
    assert len(opened) == (7 if separate else 4)


@pytest.mark.parametrize(
    ("said", "before", "after"), [("", 0.0, -1.5), ("[metadata]\nleast_reward = -2\n", -2.0, -2.0)]
)
async def test_a_forfeit_never_pays_more_than_the_least_that_the_task_has_paid(
    tmp_path, monkeypatch, said, before, after
):
    write_task(tmp_path / f"t{-before:g}", CLOSED + said)
    in_memory(monkeypatch, writes(reward_json='{"reward": -1.5, "style": 1}'))
    task = {"id": f"t{-before:g}"}
    for expected in (before, after):
        environment = HarborEnvironment(tmp_path)
        played = SerialEnvironment(environment)
        await played.start(task)
        assert played.forfeit_reward == expected
        await environment.step_message(FINISH)
        await played.close()


async def test_a_least_reward_that_is_no_number_is_refused(tmp_path, monkeypatch):
    write_task(tmp_path / "t", f'{CLOSED}[metadata]\nleast_reward = "low"\n')
    with pytest.raises(EnvironmentFailed, match=r"least_reward.*'low'"):
        await HarborEnvironment(tmp_path).reset(TASK)


async def test_a_verifiers_box_that_does_not_open_is_no_ones_loss(tmp_path, monkeypatch):
    write_task(tmp_path / "t", CLOSED + '[verifier]\nenvironment_mode = "separate"\n')
    in_memory(monkeypatch, writes(reward_txt="1"))
    environment = HarborEnvironment(tmp_path)
    await environment.reset(TASK)
    await environment.step_message(calls(("shell", {"command": "ls"})))
    for end in (Finished(code=127, output=b"", errors=b"no mkdir"), None):
        monkeypatch.setattr(boxes, "sandbox", fails_with(end))
        with pytest.raises(EnvironmentFailed):
            await environment.step_message(FINISH)
    await environment.close()


def fails_with(end: Finished | None):
    """Boxes whose commands end so; None: that do not open."""

    @asynccontextmanager
    async def sandbox(spec, provider=None):
        if end is None:
            raise ConfigError("no image")
        box = MemoryBox(spec, lambda box: None)
        box.run = lambda *_, **__: asyncio.sleep(0, end)
        yield box

    return sandbox


async def test_an_artifact_that_is_a_file_brings_no_other_file(tmp_path, monkeypatch):
    toml = f'artifacts = ["/bin/tool"]\n{CLOSED}[verifier]\nenvironment_mode = "separate"\n'
    write_task(tmp_path / "t", toml)
    opened = in_memory(monkeypatch, writes(reward_txt="1"))
    environment = HarborEnvironment(tmp_path)
    await environment.reset(TASK)
    opened[0].files |= {"/logs/copies/sh": b"mine"}
    await environment.step_message(FINISH)
    assert "/bin/sh" not in opened[1].files
    await environment.close()


async def test_the_verifiers_own_box_gets_the_artifacts_and_nothing_else(tmp_path, monkeypatch):
    toml = (
        f'artifacts = ["/out", {{source = "a/log.txt"}}, "/none"]\n{CLOSED}[verifier]\nenvironment_mode = "separate"\n'
    )
    write_task(tmp_path / "t", toml)
    opened = in_memory(monkeypatch, writes(reward_txt="1"))
    environment = HarborEnvironment(tmp_path)
    await environment.reset(TASK)
    opened[0].files |= {
        "/logs/verifier/reward.json": b'{"reward": 9}',
        "/logs/artifacts/x": b"x",
        "/out/y/z": b"z",
        "/app/a/log.txt": b"log",
        "/bin/sh": b"mine",
    }
    assert (await environment.step_message(FINISH))[1] == {"reward": 1.0}
    kept = {path: data for path, data in opened[1].files.items() if not path.startswith(("/tests", "/logs/verifier"))}
    assert kept == {"/logs/artifacts/x": b"x", "/out/y/z": b"z", "/app/a/log.txt": b"log"}
    assert opened[1].done[-1] == "close"
    await environment.close()


async def test_the_time_of_the_agent_is_that_of_its_commands(tmp_path, monkeypatch):
    write_task(tmp_path / "t", f"{CLOSED}[agent]\ntimeout_sec = 10\n")
    in_memory(monkeypatch, writes(reward_txt="0"))
    now = iter((0.0, 4.0, 100.0, 108.0))
    environment = HarborEnvironment(tmp_path, clock=lambda: next(now))
    await environment.reset(TASK)
    command = calls(("shell", {"command": "sleep 4"}))
    assert (await environment.step_message(command))[2] is False
    assert (await environment.step_message(command))[1:3] == ({"reward": 0.0}, True)


async def test_a_box_that_does_not_open_is_a_failure(tmp_path, monkeypatch):
    write_task(tmp_path / "t")
    monkeypatch.setattr(boxes, "sandbox", fails_with(None))
    environment = HarborEnvironment(tmp_path)
    with pytest.raises(EnvironmentFailed, match="'t': no"):
        await environment.reset(TASK)
    write_task(tmp_path / "t", f"{CLOSED}storage_mb = 9\n")
    with pytest.raises(EnvironmentFailed, match="limit_disk"):
        await environment.reset(TASK)
    with pytest.raises(EnvironmentFailed, match=r"task.*'\.\./t'"):
        await environment.reset({"id": "../t"})
    with pytest.raises(EnvironmentFailed, match="not begun"):
        await environment.shell("ls")


async def test_actions_that_are_none_are_answered(tmp_path, monkeypatch):
    write_task(tmp_path / "t")
    opened = in_memory(monkeypatch, writes(reward_txt="0"))
    environment = HarborEnvironment(tmp_path, actions="text")
    await environment.reset(TASK)
    for text in ("Let me think.", "shell", "shell a\0b", "shell \ud800"):
        messages, *_ = await environment.step_message(text_message("assistant", text.replace("\ud800", "?")))
        assert messages[-1].text
    assert len([one for one in opened[0].done if "command -v bash" in one]) == 1
    await environment.close()


def test_a_check_plays_the_solution_and_nothing(tmp_path, monkeypatch):
    folder = write_task(tmp_path / "t")

    def solved(box):
        is_oracle = any("/solution/solve.sh" in one for one in box.done)
        writes(reward_txt=str(int(is_oracle)))(box)

    in_memory(monkeypatch, solved)
    check_harbor(lambda: HarborEnvironment(tmp_path), [TASK])
    for reward, words in (("0", r"oracle.*0.*1"), ("1", r"nop.*1.*0")):
        in_memory(monkeypatch, writes(reward_txt=reward))
        with pytest.raises(InvalidEnvironment, match=words):
            check_harbor(lambda: HarborEnvironment(tmp_path), [TASK])
    in_memory(monkeypatch, lambda box: None)
    with pytest.raises(InvalidEnvironment, match=r"'t'.*wrote"):
        check_harbor(lambda: HarborEnvironment(tmp_path), [TASK])
    (folder / "solution" / "solve.sh").unlink()
    in_memory(monkeypatch, writes(reward_txt="0"))
    with pytest.warns(UserWarning, match="only nop"):
        check_harbor(lambda: HarborEnvironment(tmp_path), [TASK])


async def test_settings_of_the_catalogue(tmp_path, monkeypatch):
    write_task(tmp_path / "t")
    asked = []
    monkeypatch.setattr(catalog, "sandbox_provider", lambda spec, name: asked.append(name))
    entry = catalog_entry(f"harbor/{tmp_path}")
    assert entry.generate("train", 9, 1) == [{"id": "t", "prompt": "Do it."}]
    environment = entry.make(actions="text", max_steps=3, variables="A, B")
    assert (environment.max_steps, environment.reusable) == (3, True)
    assert environment._rules == BoxRules(variables={"A", "B"})
    other = entry.make(provider="theirs", limit_disk=False, network=True)
    assert other._rules == BoxRules(network=True, variables=set(), limit_disk=False, provider="theirs")
    assert asked == [None, "theirs"]
    opened = in_memory(monkeypatch, writes(reward_txt="1"))
    await played(other)
    assert [box.provider for box in opened] == ["theirs"]
    for wrong in ({"command_seconds": 0.0}, {"path": "x"}, {"max_steps": 0}):
        with pytest.raises(ConfigError):
            entry.make(**wrong)
