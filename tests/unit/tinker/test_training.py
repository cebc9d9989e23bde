"""Models that are trained over HTTP: order, repetition, losses, checkpoints, and what is refused."""

from __future__ import annotations

import io
import json
import time

import numpy as np
import pytest
import safetensors.numpy
from rich.console import Console

from palestra.cli.main import main
from palestra.dashboard.runs import runs_of
from palestra.models.adapter_files import read_adapter
from palestra.runtime.run_dir import weights_of_policy
from palestra_bases.tinker.records import TinkerLimits
from palestra_inspect.folder_run import FolderRun
from palestra_inspect.top_view import WatchedRun, view_of
from unit.tinker.messages import datum
from unit.tinker.serving import TINY, Client, Failed, data_of, running

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker")) as started:
        yield started


@pytest.fixture
def ada(server):
    client = Client(server.url, server.key("ada"))
    yield client
    if client.session_id:  # its models and samplers make room for those of other tests
        client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})


def test_a_model_learns_what_it_is_trained_on(ada):
    model = ada.model(rank=8)
    data = data_of(0)
    losses = []
    for _ in range(12):
        computed, stepped = model.computes(data), model.steps(5e-2)
        losses.append(model.output(computed).metrics["loss:sum"])
        assert ada.result(stepped)["metrics"]["grad_norm"] > 0
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
def test_requests_are_executed_in_the_order_of_their_numbers(ada):
    model, other = ada.model(), ada.model()
    third = model.computes(data_of(3), seq_id=3)
    second = model.computes(data_of(2), seq_id=2)
    assert ada.post("retrieve_future", {"request_id": second}).json()["type"] == "try_again"  # the first is missing
    first = model.computes(data_of(1), seq_id=1)
    found = [model.output(one).metrics["loss:sum"] for one in (first, second, third)]
    wanted = [other.output(other.computes(data_of(n))).metrics["loss:sum"] for n in (1, 2, 3)]
    assert found == wanted


def test_a_request_that_is_sent_again_is_the_same_and_is_done_once(ada):
    model, other = ada.model(), ada.model()
    for one in (model, other):
        one.computes(data_of(1))
    body = {"model_id": model.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    ids = {ada.good("optim_step", body)["request_id"] for _ in range(3)}
    assert len(ids) == 1
    ada.result(ids.pop())
    model.seq_id = 2
    ada.result(other.steps(0.1))
    assert ada.good("optim_step", body)["request_id"]  # also when it is done
    np.testing.assert_array_equal(model.logprobs(), other.logprobs())
    changed = ada.post("optim_step", body | {"adam_params": {"learning_rate": 0.2}})
    assert changed.status_code == 422
    assert "had another request with the number 2" in changed.json()["error"]


@pytest.mark.slow
def test_the_first_weights_follow_the_seed_and_forward_only_changes_nothing(ada):
    one, same, other = ada.model(seed=7), ada.model(seed=7), ada.model(seed=8)
    before = one.logprobs()
    np.testing.assert_array_equal(before, one.logprobs())
    for model in (one, same, other):
        model.train(2)
    np.testing.assert_array_equal(one.logprobs(), same.logprobs())
    assert not np.array_equal(one.logprobs(), other.logprobs())


def test_clipping_is_off_at_zero(ada):
    one, same, clipped = ada.model(), ada.model(), ada.model()
    for model, norm in ((one, 0.0), (same, 1e9), (clipped, 1e-12)):
        model.computes(data_of(1))
        ada.result(model.steps(1e-2, grad_clip_norm=norm, eps=1e-6))
    np.testing.assert_array_equal(one.logprobs(), same.logprobs())
    assert not np.allclose(one.logprobs(), clipped.logprobs(), atol=1e-4)


@pytest.mark.parametrize(
    ("lora", "layers"),
    [
        ({"train_mlp": False}, {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
        ({}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
    ],
)
def test_the_adapter_stands_beside_the_layers_that_were_asked_for(server, ada, lora, layers):
    model = ada.model(rank=3, **lora)
    path = model.saves("here")
    found = server.do(lambda: server.server.service.saved.checkpoint("ada", path))
    tensors = safetensors.numpy.load_file(found.folder / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in tensors} == layers
    assert {t.shape[0] for name, t in tensors.items() if ".lora_A." in name} == {3}
    info = ada.good("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"]) == (TINY, 3)
    for kind in ("attn", "mlp", "unembed"):
        assert info[f"train_{kind}"] == lora.get(f"train_{kind}", True)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_begins_a_new_model_and_can_be_loaded_into_one(ada, optimizer):
    model = ada.model()
    model.train(3)
    path, said = model.saves("three"), model.logprobs()
    body = {"session_id": ada.session_id, "model_seq_id": ada.models, "path": path, "optimizer": optimizer}
    ada.models += 1
    accepted = ada.good("load_weights", body)
    assert accepted["model_id"] == f"{ada.session_id}:train:{ada.models - 1}"
    loaded = type(model)(ada, ada.result(accepted["request_id"])["model_id"])
    np.testing.assert_array_equal(loaded.logprobs(), said)
    for one in (model, loaded):
        one.computes(data_of(50))
        ada.result(one.steps())
    assert np.array_equal(model.logprobs(), loaded.logprobs()) is optimizer
    legacy = {"path": path, "optimizer": optimizer}
    assert ada.result(model.ask("load_weights", **legacy))["path"] == path
    np.testing.assert_array_equal(model.logprobs(), said)


def test_names_of_checkpoints_are_kept_listed_and_deleted(server, ada):
    model = ada.model()
    first = model.saves("a", user_metadata={"k": "v"})
    with pytest.raises(Failed, match="overwrite it"):
        model.saves("a")
    model.train()
    assert model.saves("a", overwrite=True) == first
    sampler = model.samples_as("a")
    url = f"training_runs/{model.model_id}"
    listed = ada.http.get(f"{url}/checkpoints").json()["checkpoints"]
    assert {one["tinker_path"]: one["checkpoint_type"] for one in listed} == {first: "training", sampler: "sampler"}
    assert ada.http.get(url).json()["last_checkpoint"]["tinker_path"] == first
    assert model.model_id in [run["training_run_id"] for run in ada.http.get("training_runs").json()["training_runs"]]
    folder = server.do(lambda: server.server.service.saved.checkpoint("ada", first)).folder
    assert folder.is_dir()
    assert ada.http.delete(f"{url}/checkpoints/weights/a").status_code == 200
    assert not folder.parent.exists()
    gone = ada.post("weights_info", {"tinker_path": first})
    assert (gone.status_code, gone.json()["category"]) == (404, "user")
    for name in ("../a", "", "a/b", "x" * 200):
        with pytest.raises(Failed, match="checkpoint's name"):
            model.saves(name)


def test_a_checkpoint_expires(server, ada):
    model = ada.model()
    with pytest.raises(Failed, match=r"ttl_seconds.*5.*3600"):
        model.saves("short", ttl_seconds=5)
    path = model.saves("short", ttl_seconds=3600)
    url = f"training_runs/{model.model_id}/checkpoints"
    assert ada.http.get(url).json()["checkpoints"][0]["expires_at"] is not None
    service = server.server.service
    server.do(lambda: service.saved.set_expiry(path, 1.0))
    assert ada.http.get(url).json()["checkpoints"] == []
    expired = ada.post(
        "create_sampling_session", {"session_id": ada.session_id, "sampling_session_seq_id": 9, "model_path": path}
    )
    assert expired.status_code == 404
    assert "has expired" in expired.json()["error"]
    folder = server.do(lambda: service.saved.checkpoint("ada", path)).folder
    server.do(service.sweep)
    assert not folder.exists()
    assert server.do(lambda: service.saved.checkpoint("ada", path)) is None


def test_a_run_folder_is_like_that_of_any_job(server, ada, tmp_path):
    model = ada.model()
    model.train(3)
    ada.good(f"sessions/{ada.session_id}/finish", {"reason": {"type": "success"}})
    folder = server.folder / "models" / model.model_id.replace(":", "-")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1.0, 2.0, 3.0]
    assert all(row["train/rows"] == 2 and row["train/trained_tokens"] == 11 and row["train/loss"] > 0 for row in rows)
    path, step = weights_of_policy(folder, None)
    assert (path.name, step) == ("step-000003", 3)
    (run,) = runs_of([folder])
    assert run.config.policies["policy"].adapter.rank == 4
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(view_of([WatchedRun(FolderRun(run))], 100, time.time()))
    assert folder.name in console.export_text()
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert read_adapter(tmp_path / "out").config.rank == 4
    refused = ada.post(
        "create_model",
        {"session_id": ada.session_id, "model_seq_id": 99, "base_model": TINY, "lora_config": {"rank": 1}},
    )
    assert (refused.status_code, "is finished" in refused.json()["error"]) == (422, True)
    assert ada.post("session_heartbeat", {"session_id": ada.session_id}).status_code == 410


def test_what_can_not_be_done_is_a_failed_future_and_the_next_request_is_done(ada):
    model = ada.model()
    for request, said in (
        (lambda: model.steps(), r"gradient.*apply"),
        (lambda: model.computes([datum([1, 2], [2, 3], weights=[1.0])]), r"\[1\].*cross_entropy"),
        (lambda: model.computes([datum([1], [1], logprobs=[0.0], advantages=[np.nan])], "ppo"), r"advantages.*nan"),
        (lambda: model.computes([datum([0] * 2048, [0] * 2048)]), r"2048.*1.*2047"),
        (lambda: model.steps(-1.0), r"adam_params.learning_rate.*-1"),
        (lambda: model.steps(1.0, beta1=1.0), r"adam_params.beta1.*1"),
        (lambda: model.ask("optim_step", optimizer_params={"type": "dimuon"}), r"adamw.*'dimuon'"),
        (lambda: model.ask("load_weights", path="tinker://a/weights/b", optimizer=True), "'tinker://a"),
        (lambda: model.ask("save_weights_for_sampler"), "sampling_session_seq_id"),
    ):  # fmt: skip
        with pytest.raises(Failed, match=said) as failed:
            ada.result(request())
        assert failed.value.category == "user"
    model.train()


@pytest.mark.parametrize("rank", [0, -1, 10_000])
def test_a_rank_that_no_layer_can_have_is_refused(ada, rank):
    ada.session()
    body = {"session_id": ada.session_id, "model_seq_id": 0, "base_model": TINY, "lora_config": {"rank": rank}}
    answer = ada.post("create_model", body)
    if rank < 1:
        assert answer.status_code == 422
        assert f"lora_config.rank is {rank}" in answer.json()["error"]
    else:
        with pytest.raises(Failed, match=r"adapter\.rank.*10000") as failed:
            ada.result(answer.json()["request_id"])
        assert failed.value.category == "user"
        assert ada.post("get_info", {"model_id": answer.json()["model_id"]}).status_code == 404


def test_what_is_wrong_at_the_door_has_a_status(ada):
    ada.session()
    start = {"session_id": ada.session_id, "model_seq_id": 0, "base_model": TINY, "lora_config": {"rank": 2}}
    nothing = {"train_mlp": False, "train_attn": False, "train_unembed": False}
    for body, status, said in (
        (start | {"base_model": "gpt-7"}, 404, "the model 'gpt-7' is not served here; there are 'tiny-random'"),
        (start | {"session_id": "session-x"}, 404, "no session 'session-x'"),
        (start | {"lora_config": None}, 422, "lora_config is missing"),
        (start | {"lora_config": {"rank": 2} | nothing}, 422, "no layer of tiny-random"),
        (start | {"optimizer_config": {"type": "dimuon"}}, 422, "the optimizer 'dimuon' is not supported"),
        (start | {"lora_config": {"rank": "two"}}, 422, "lora_config.rank"),
    ):
        answer = ada.post("create_model", body)
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
        assert answer.json()["category"] == "user"
    packed = ada.http.post(
        "forward_backward",
        content=b"\x28\xb5\x2f\xfd",
        headers={"content-type": "application/x-protobuf", "content-encoding": "zstd"},
    )
    assert (packed.status_code, "compressed" in packed.json()["error"]) == (400, True)
    assert ada.post("forward_backward", b"\xff\xff").status_code == 422
    assert ada.post("forward_backward", {}).status_code == 400
    assert ada.post("create_custom_loss", {}).status_code == 400
    assert ada.post("no_such_route", {}).status_code == 404


def test_quotas_are_of_a_tenant_and_say_what_frees_a_place(tmp_path):
    limits = TinkerLimits(models=2, waiting=3, checkpoints=1, poll_seconds=5.0, body_bytes=10_000, json_bytes=5_000)
    with running(tmp_path, limits) as server:
        ada, ben = Client(server.url, server.key("ada")), Client(server.url, server.key("ben"))
        model = ada.model()
        ada.model()
        body = {"session_id": ada.session_id, "model_seq_id": 2, "base_model": TINY, "lora_config": {"rank": 2}}
        full = ada.post("create_model", body)
        assert (full.status_code, "closing a ServiceClient" in full.json()["error"]) == (429, True)
        ben.model()
        model.saves("one")
        with pytest.raises(Failed, match="1 checkpoints"):
            model.saves("two")
        for number in (10, 11, 12):
            model.computes(data_of(0), seq_id=number)
        waits = {"model_id": model.model_id, "seq_id": 13, "adam_params": {}}
        assert ada.post("optim_step", waits).status_code == 429
        assert ada.post("forward_backward", b"x" * 20_000).status_code == 413
        ada.good(f"sessions/{ada.session_id}/finish", {"reason": {"type": "success"}})
        ada.session()
        assert ada.post("create_model", body | {"session_id": ada.session_id}).status_code in (200, 429)
        ben.model()
