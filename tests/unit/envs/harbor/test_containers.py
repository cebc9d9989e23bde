"""Tasks of Harbor's format in real containers: oracle 1, nop 0, forgers 0, limits, and nothing left behind."""

from __future__ import annotations

import pytest
from machine import require

from palestra.envs import catalog_entry
from palestra.errors import EnvironmentFailed
from palestra_worlds.harbor import HarborEnvironment
from palestra_worlds.harbor.catalog import check_harbor, shipped_folder
from palestra_worlds.harbor.task import read_tasks
from unit.envs.harbor.tasks import write_task
from unit.envs.playing import calls

pytestmark = pytest.mark.ci

require("podman", "runc", "busybox")
NAMES = ["add", "count-errors", "greet", "mend-larger", "shout"]
FINISH = calls(("finish", {"answer": "done"}))


def shell(command: str):
    return calls(("shell", {"command": command}))


@pytest.fixture
async def environment():
    made = HarborEnvironment(shipped_folder(), command_seconds=5)
    yield made
    await made.close()


async def earned(environment, name: str, *commands: str) -> float:
    await environment.reset({"id": name})
    for command in commands:
        await environment.step_message(shell(command))
    return (await environment.step_message(FINISH))[1]["reward"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_task_that_ships_pays_its_solution_and_not_nothing(name):
    assert name in read_tasks(shipped_folder())
    check_harbor(catalog_entry("harbor").make, [{"id": name}])


FORGERS = {
    "writes the reward": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
    "replaces the shell": "for name in sh test od cat rm su head; do printf '#!/bin/sh\\nexit 0\\n' > /bin/$name; done",
    "attacks the verifier": "echo 'echo 1 > /logs/verifier/reward.txt; echo {} > /tests/test.sh; rm -rf /tests;"
    ' (while :; do echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; done) & echo 42\' > run.sh',
    "hangs": "echo 'trap \"\" TERM; while :; do :; done' > run.sh",
    "floods": "echo 'yes' > run.sh",
}


@pytest.mark.parametrize(
    "how", [how if how == "attacks the verifier" else pytest.param(how, marks=pytest.mark.slow) for how in FORGERS]
)
async def test_who_forges_the_reward_gets_none(environment, how):
    assert await earned(environment, "add", FORGERS[how]) == 0.0


@pytest.mark.slow
async def test_a_fork_bomb_does_not_block_scoring(environment):
    commands = ("echo 'echo $(($1 + $2))' > run.sh", "f() { f | f & }; f", "true")
    assert await earned(environment, "add", *commands) == 1.0


@pytest.mark.slow
async def test_a_command_is_ended_after_its_time_and_with_its_output(environment):
    await environment.reset({"id": "greet"})
    (answer,), *_ = await environment.step_message(shell("echo begun; sleep 60"))
    assert answer.text == "begun\n(ended after 5 s)"
    (answer,), *_ = await environment.step_message(shell("yes"))
    assert "(ended: it wrote too much)" in answer.text
    assert len(answer.text) < 5000
    (answer,), *_ = await environment.step_message(shell("ls /none; exit 3"))
    assert answer.text.endswith("(exit code 3)")


@pytest.mark.slow
async def test_a_verifier_in_the_agents_box(tmp_path):
    toml = '[environment]\nnetwork_mode = "no-network"\n[agent]\nuser = "nobody"\n[verifier]\nuser = "root"\n'
    tests = '#!/bin/sh\necho "{\\"reward\\": $(cat /app/answer), \\"user\\": $(id -u)}" > /logs/verifier/reward.json\n'
    shipped = shipped_folder() / "greet" / "environment"
    folder = write_task(tmp_path / "t", toml, tests__test_DOT_sh=tests)
    dockerfile = (shipped / "Dockerfile").read_text() + 'RUN ["/bin/chmod", "777", "/app"]\n'
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    for name in ("busybox", "passwd"):
        (folder / "environment" / name).write_bytes((shipped / name).read_bytes())
    (folder / "environment" / "busybox").chmod(0o755)
    environment = HarborEnvironment(tmp_path)
    try:
        await environment.reset({"id": "t"})
        (answer,), *_ = await environment.step_message(shell("echo 1 > answer; id -u"))
        assert answer.text == "65534"
        assert (await environment.step_message(FINISH))[1] == {"reward": 1.0, "user": 0.0}
    finally:
        await environment.close()


@pytest.mark.slow
async def test_an_image_that_does_not_build_fails_the_episode_in_one_line(tmp_path):
    write_task(tmp_path / "t", environment__Dockerfile="FROM scratch\nCOPY nothing /\n")
    environment = HarborEnvironment(tmp_path)
    with pytest.raises(EnvironmentFailed, match=r"'t'.*COPY") as found:
        await environment.reset({"id": "t"})
    assert "\n" not in str(found.value)
