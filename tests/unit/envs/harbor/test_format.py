"""The reader: what it takes of Harbor's format, what it refuses by name, and folders that mean it harm."""

from __future__ import annotations

import os

import pytest
from machine import require

from palestra.errors import ConfigError
from palestra_worlds.harbor.boxes import BoxRules, agent_spec, user_of, verifier_spec
from palestra_worlds.harbor.catalog import HARBOR, SHARED, SHIPPED, harbor_tasks, shipped_folder
from palestra_worlds.harbor.task import read_task, read_tasks, resolved
from unit.envs.harbor.tasks import CLOSED, write_task

WHOLE = """
version = "1.0"
artifacts = ["/out", {source = "log.txt", exclude = ["*.tmp"], destination = "x"}]
[task]
name = "org/name"
anything = {goes = 1}
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 9
user = 1000
[verifier]
timeout_sec = 8.5
env = {MODE = "strict"}
user = "tester"
environment_mode = "separate"
[environment]
build_timeout_sec = 7
cpus = 0.5
memory = "1G"
storage = "512M"
allow_internet = false
workdir = "/app"
env = {A = "1", B = "${HARBOR_TEST_B:-two}"}
[solution]
env = {S = "s"}
"""


def test_the_whole_format_is_read(tmp_path):
    task = read_task(
        write_task(tmp_path / "whole", WHOLE, instruction_DOT_md="<!-- canary 1 -->\n\n# Canary x\nGo: é.\n")
    )
    assert (task.name, task.instruction) == ("whole", "Go: é.")
    spec = agent_spec(task, BoxRules())
    assert spec.build == tmp_path / "whole" / "environment"
    assert (spec.network, spec.user, spec.workdir) == ("none", None, "/app")
    assert (user_of(task.table.agent), user_of(task.table.verifier)) == ("1000", "tester")
    assert spec.environment == {"A": "1", "B": "two"}
    assert (spec.limits.cpus, spec.limits.memory_mib, spec.limits.disk_mib) == (0.5, 1024, 512)
    assert agent_spec(task, BoxRules(limit_disk=False)).limits.disk_mib is None
    verifier = verifier_spec(task, BoxRules())
    assert verifier is not None
    assert verifier.build == spec.build
    assert task.verifier_box is not None
    assert not task.verifier_box[2]
    assert [one.source for one in task.table.artifacts] == ["/out", "log.txt"]
    assert (task.table.agent.timeout_sec, task.table.verifier.timeout_sec) == (9, 8.5)


def test_the_verifiers_image_is_its_own_or_that_of_its_tests_or_the_agents(tmp_path):
    named = f'{CLOSED}[verifier.environment]\ndocker_image = "v:1"\nnetwork_mode = "no-network"\n'
    (box, build, bundled) = read_task(write_task(tmp_path / "a", named, tests__test_DOT_sh=None)).verifier_box or ()
    assert (box.docker_image, build, bundled) == ("v:1", None, True)
    separate = '[verifier]\nenvironment_mode = "separate"\n[environment]\ndocker_image = "a:1"\n'
    (box, build, bundled) = read_task(write_task(tmp_path / "b", separate)).verifier_box or ()
    assert (box.docker_image, build, bundled) == ("a:1", None, False)
    (box, build, bundled) = read_task(write_task(tmp_path / "c", separate, tests__Dockerfile="")).verifier_box or ()
    assert (build, bundled) == (tmp_path / "c" / "tests", True)
    assert read_task(write_task(tmp_path / "d")).verifier_box is None


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[[steps]]\nname = 'a'\n", "needs steps"),
        ("[environment]\ngpus = 1\n", "needs GPUs"),
        ("[environment]\nos = 'Windows'\n", "needs the system Windows"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.b']\n", "needs an allowlist"),
        ("[verifier]\nnetwork_mode = 'allowlist'\n", "needs an allowlist"),
        ("[[environment.mcp_servers]]\nname = 'm'\n", "needs mcp_servers"),
        ("[environment.healthcheck]\ncommand = 'true'\n", "needs a healthcheck"),
        ("[verifier.environment]\ngpus = 2\n", "needs GPUs"),
        ("[[verifier.collect]]\ncommand = 'x'\n", "needs commands that collect"),
        ("artifacts = [{source = '/a', service = 'db'}]\n", "needs compose"),
    ],
)
def test_what_is_not_played_is_refused_by_name_with_the_recipe(tmp_path, toml, words):
    with pytest.raises(ConfigError, match=rf"'t'.*{words}.*Harbor"):
        read_task(write_task(tmp_path / "t", toml))


@pytest.mark.parametrize(
    ("file", "words"),
    [("environment__docker-compose_DOT_yaml", "compose"), ("steps__a", "steps"), ("_DOT_harborignore", "harborignore")],
)
def test_files_that_ask_for_more_are_refused_too(tmp_path, file, words):
    with pytest.raises(ConfigError, match=words):
        read_task(write_task(tmp_path / "t", **{file: ""}))


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("schema_version = '2.0'", "1.x"),
        ("[environment]\nenviron = {}", r"'environment.environ'"),
        ("[verifier]\nenviroment_mode = 'separate'", "not known"),
        ("[environment]\ncpus = nan", "cpus"),
        ("[environment]\ncpus = 0", "cpus"),
        ("[environment]\nmemory = 'much'", "memory_mb"),
        ("[verifier]\ntimeout_sec = inf", "timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "timeout_sec"),
        ("[environment]\nenv = {A = 1}", "env"),
        ("environment = 3", "environment"),
        ("artifacts = ['../../etc']", "artifact"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "one out"),
        ("[verifier]\nnetwork_mode = 'no-network'", "another network_mode"),
        ("a = [" + "[" * 5000, "no TOML"),
        ("\x00", "no TOML"),
        ("# " + "x" * 2**20, r"longer.*1.*MiB"),
    ],
)
def test_a_wrong_table_is_one_line(tmp_path, toml, words):
    with pytest.raises(ConfigError, match=words) as found:
        read_task(write_task(tmp_path / "t", toml))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 800


@pytest.mark.parametrize("missing", ["instruction_DOT_md", "environment__Dockerfile", "tests__test_DOT_sh"])
def test_a_missing_file_is_named(tmp_path, missing):
    name = missing.replace("__", "/").replace("_DOT_", ".")
    with pytest.raises(ConfigError, match=name):
        read_task(write_task(tmp_path / "t", **{missing: None}))


def test_what_is_no_plain_file_is_refused(tmp_path):
    (tmp_path / "secret").write_text("s")
    linked = write_task(tmp_path / "linked")
    (linked / "tests" / "more").mkdir()
    (linked / "tests" / "more" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="tests/more/link"):
        read_task(linked).tests()
    folder = write_task(tmp_path / "folder")
    (folder / "solution" / "all").symlink_to("/etc")
    with pytest.raises(ConfigError, match="solution/all"):
        read_task(folder).solution()
    pipe = write_task(tmp_path / "pipe")
    os.mkfifo(pipe / "tests" / "pipe")
    with pytest.raises(ConfigError, match="no file"):
        read_task(pipe).tests()
    toml = write_task(tmp_path / "toml", instruction_DOT_md=None)
    (toml / "instruction.md").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"instruction.md.*link"):
        read_task(toml)


def test_huge_files_and_bad_text_are_refused(tmp_path):
    huge = write_task(tmp_path / "huge")
    with open(huge / "tests" / "hole", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match=r"64.*MiB"):
        read_task(huge).tests()
    text = write_task(tmp_path / "text")
    (text / "instruction.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8"):
        read_task(text)
    with pytest.raises(ConfigError, match="printable"):
        read_task(write_task(tmp_path / "a\nb"))


def test_a_variable_of_the_machine_is_given_only_where_it_was_allowed(monkeypatch):
    monkeypatch.setenv("HARBOR_SECRET", "hush")
    with pytest.raises(ConfigError, match=r"'HARBOR_SECRET'.*settings\.variables"):
        resolved({"A": "${HARBOR_SECRET}"}, (), "t")
    asked = {"A": "${HARBOR_SECRET:-none}", "B": "a ${HARBOR_SECRET} b", "C": "${HARBOR_UNSET:-}"}
    assert resolved(asked, (), "t") == {"A": "none", "B": "a ${HARBOR_SECRET} b", "C": ""}
    assert resolved({"A": "${HARBOR_SECRET}"}, {"HARBOR_SECRET"}, "t") == {"A": "hush"}
    with pytest.raises(ConfigError, match="not set"):
        resolved({"A": "${HARBOR_UNSET}"}, {"HARBOR_UNSET"}, "t")
    with pytest.raises(ConfigError, match="a variable"):
        resolved({"A=B": "1"}, (), "t")


def test_the_network_is_given_only_where_task_and_job_agree(tmp_path):
    task = read_task(write_task(tmp_path / "t", ""))
    with pytest.raises(ConfigError, match=r"settings\.network"):
        agent_spec(task, BoxRules())
    assert agent_spec(task, BoxRules(network=True)).network == "open"
    closed = read_task(write_task(tmp_path / "u"))
    assert agent_spec(closed, BoxRules(network=True)).network == "none"


def test_a_folder_is_split_without_regard_to_the_seed(tmp_path):
    for number in range(9):
        write_task(tmp_path / f"t{number}")
    (tmp_path / "notes").mkdir()

    def names(split, count, seed):
        return [task["id"] for task in harbor_tasks(lambda: tmp_path, split, count, seed)]

    train, held_out = names("train", 100, 1), names("validation", 100, 1)
    assert (len(train), len(held_out)) == (7, 2)
    assert {*train, *held_out} == {f"t{number}" for number in range(9)}
    assert set(names("train", 100, 2)) == set(train)
    assert names("train", 3, 1) == train[:3]
    assert len({tuple(names("train", 100, seed)) for seed in range(9)}) > 1
    assert [task["id"] for task in harbor_tasks(lambda: tmp_path / "t3", "train", 9, 1)] == ["t3"]


def test_a_folder_with_a_task_that_cant_be_played_says_so(tmp_path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "bad", "steps = [{name = 'a'}]")
    with pytest.raises(ConfigError, match=r"'bad'.*needs"):
        read_tasks(tmp_path)
    with pytest.raises(ConfigError, match=r"a task\.toml"):
        read_tasks(tmp_path / "good" / "tests")
    with pytest.raises(ConfigError, match="be read"):
        read_tasks(tmp_path / "none")
    assert HARBOR.part is not None
    with pytest.raises(ConfigError, match="be read"):
        HARBOR.part(str(tmp_path / "none")).generate("train", 1, 1)


def test_the_tasks_that_ship_are_small_and_closed():
    require("busybox")
    tasks = read_tasks(shipped_folder())
    assert len(tasks) == 5
    for task in tasks.values():
        assert agent_spec(task, BoxRules()).network == "none"
        assert verifier_spec(task, BoxRules()) is not None
        assert task.has_solution
    files = [path for folder in (SHIPPED, SHARED) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30_000


@pytest.mark.parametrize("image", ["/root/backup.tar.gz", "../x.tar", "./folder", "oci:/root/x", "--privileged"])
def test_an_image_that_is_a_path_of_this_machine_is_refused(tmp_path, image):
    with pytest.raises(ConfigError, match=r"docker_image.*(path|no name)"):
        read_task(write_task(tmp_path / "x", f'[environment]\ndocker_image = "{image}"\nnetwork_mode = "no-network"\n'))


def test_a_folder_of_a_task_is_no_link(tmp_path):
    task = write_task(tmp_path / "x", CLOSED)
    (task / "environment").rename(tmp_path / "elsewhere")
    (task / "environment").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="environment is a link"):
        read_task(task)
