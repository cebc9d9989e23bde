"""Models that leave the memory, or whose server is started again, go on bit by bit as if nothing had been."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from palestra.models.adapter_files import read_adapter
from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.serving import TINY, Client, Failed, Model, data_of, running

QUICK = {"poll_seconds": 5.0}


def go_on(model: Model) -> np.ndarray:
    """Some more requests, and what the model says after them."""
    model.computes(data_of(90))
    model.client.result(model.steps())
    model.train(1)
    return model.logprobs()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize("gradient", [True, False])
def test_a_server_that_is_started_again_goes_on_where_it_was(tmp_path, every, gradient):
    limits = TinkerLimits(checkpoint_steps=every, **QUICK)
    with running(tmp_path / "whole", limits) as server:
        model = Client(server.url, server.key()).model()
        model.train(3)
        model.train(2)
        if gradient:
            model.computes(data_of(80))
        wanted = go_on(model)
    with running(tmp_path / "cut", limits) as server:
        model = Client(server.url, server.key()).model()
        model.train(3)
    with running(tmp_path / "cut", limits) as server:
        client = Client(server.url, server.key(), session_id=model.client.session_id)
        model = Model(client, model.model_id, model.seq_id)
        model.train(2)
        if gradient:
            last = model.computes(data_of(80))
            known = client.result(last)
    with running(tmp_path / "cut", limits) as server:
        client = Client(server.url, server.key())
        if gradient:
            assert client.result(last) == known  # a result outlives its server
        found = go_on(Model(client, model.model_id, model.seq_id))
        rows = (tmp_path / "cut" / "models" / model.model_id.replace(":", "-") / "metrics.jsonl").read_text()
    np.testing.assert_array_equal(found, wanted)
    assert [
        f'"step":{n}' in line.replace(".0", "").replace(" ", "") for n, line in enumerate(rows.splitlines(), 1)
    ] == [True] * 7


@pytest.mark.slow
def test_a_server_that_dies_between_two_loads_without_a_step_has_the_model(tmp_path, monkeypatch):
    """The second load replaces the checkpoint of the first, before which nothing is in the journal any more."""
    limits, passes = TinkerLimits(**QUICK), []

    def copied(point: str) -> None:
        passes.append(point)
        if passes.count("before_checkpoint_rename") == 2:
            shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=shutil.ignore_patterns("*.lock"))
            passes.append("before_checkpoint_rename")

    with running(tmp_path / "whole", limits) as server:
        model = Client(server.url, server.key()).model()
        model.train(1)
        paths = [model.saves("one"), model.saves("two")]
        monkeypatch.setattr("palestra.trainer.checkpoint.fault_point", copied)
        for path in paths:
            model.client.result(last := model.ask("load_weights", path=path, optimizer=True))
        monkeypatch.undo()
        model.train(1)
        wanted = model.logprobs()
    with running(tmp_path / "cut", limits) as server:
        model = Model(Client(server.url, server.key()), model.model_id, model.seq_id - 3)
        model.client.result(last)
        model.train(1)
        np.testing.assert_array_equal(model.logprobs(), wanted)


@pytest.mark.slow
def test_steps_that_are_done_again_are_not_saved_with_half_of_the_next_one(tmp_path):
    """The checkpoint is due while the gradient of the next step is there: it has to wait for that step."""
    limits = TinkerLimits(checkpoint_steps=2, **QUICK)
    with running(tmp_path / "whole", limits) as server:
        model = Client(server.url, server.key()).model()
        model.train(3)
        wanted = model.logprobs()
    with running(tmp_path / "cut", TinkerLimits(checkpoint_steps=100, **QUICK)) as server:
        model = Client(server.url, server.key()).model()
        model.train(2)
        model.output(model.computes(data_of(2)))  # so that no checkpoint is written when the server ends
    for last in (False, True):
        with running(tmp_path / "cut", limits) as server:
            client = Client(server.url, server.key())
            model = Model(client, model.model_id, model.seq_id)
            if last:
                client.result(model.steps())
                np.testing.assert_array_equal(model.logprobs(), wanted)
            else:
                model.logprobs()


@pytest.mark.slow
def test_more_models_than_fit_take_turns_and_do_not_notice(tmp_path):
    results = {}
    for name, slots in (("few", 1), ("all", 8)):
        with running(tmp_path / name, TinkerLimits(**QUICK), slots=slots) as server:
            client = Client(server.url, server.key())
            models = [client.model(rank=rank, seed=rank) for rank in (2, 4, 8)]
            for number in range(4):
                for model in models:  # one after another: common passes of several round otherwise
                    model.computes(data_of(number))
                    client.result(model.steps(1e-2 * model.seq_id))
            results[name] = [model.logprobs() for model in models]
            asked = [future for model in models for future in (model.computes(data_of(4)), model.steps())]
            for future in asked:
                client.result(future)
            evictions = server.server.shared.queue.trainer._slots.evictions
            assert evictions >= 12 if slots == 1 else not evictions
    for few, every in zip(results["few"], results["all"], strict=True):
        np.testing.assert_array_equal(few, every)


@pytest.mark.slow
def test_loading_a_checkpoint_outlives_the_checkpoint(tmp_path):
    limits = TinkerLimits(checkpoint_steps=2, **QUICK)
    with running(tmp_path, limits) as server:
        client = Client(server.url, server.key())
        model = client.model()
        model.train(2)
        path = model.saves("two")
        two = model.logprobs()
        model.train(3)
        client.result(model.ask("load_weights", path=path, optimizer=False))
        np.testing.assert_array_equal(model.logprobs(), two)
        assert client.http.delete(f"training_runs/{model.model_id}/checkpoints/weights/two").status_code == 200
        model.computes(data_of(3))
    with running(tmp_path, limits) as server:
        client = Client(server.url, server.key())
        again = Model(client, model.model_id, model.seq_id)
        np.testing.assert_array_equal(again.logprobs(), two)
        client.result(again.steps())


@pytest.mark.slow
def test_a_damaged_checkpoint_is_replaced_by_the_one_before_and_the_journal(tmp_path):
    limits = TinkerLimits(checkpoint_steps=2, **QUICK)
    with running(tmp_path, limits) as server:
        model = Client(server.url, server.key()).model()
        model.train(7)
        wanted = model.logprobs()
    run = tmp_path / "models" / model.model_id.replace(":", "-") / "checkpoints"
    newest, before = sorted(run.glob("step-*"))[::-1]
    (newest / "adapter_model.safetensors").write_bytes(b"")
    with running(tmp_path, limits) as server:
        client = Client(server.url, server.key())
        np.testing.assert_array_equal(Model(client, model.model_id, model.seq_id).logprobs(), wanted)
    for folder in run.glob("step-*"):
        (folder / "adapter_model.safetensors").write_bytes(b"")
    with running(tmp_path, limits) as server:
        client = Client(server.url, server.key())
        again = Model(client, model.model_id, model.seq_id + 1)
        with pytest.raises(Failed, match="damaged") as failed:
            again.logprobs()
        assert failed.value.category == "server"
    assert before.exists()


@pytest.mark.slow
def test_checkpoints_go_both_ways(tmp_path):
    with running(tmp_path / "one") as server:
        client = Client(server.url, server.key())
        model = client.model(rank=3, train_mlp=False)
        model.train(3)
        saved = model.saves("three")
        folder = server.do(lambda: server.server.service.saved.checkpoint("ada", saved)).folder
        said = model.logprobs()
    assert read_adapter(folder).config.rank == 3  # PEFT's format, which a job takes as a model
    with running(tmp_path / "other", adapters={"theirs": folder}) as server:
        for tenant in ("ada", "ben"):
            client = Client(server.url, server.key(tenant))
            client.session()
            path = "tinker://imported:train:0/weights/theirs"
            body = {"session_id": client.session_id, "model_seq_id": 0, "path": path, "optimizer": False}
            loaded = Model(client, client.result(client.good("load_weights", body)["request_id"])["model_id"])
            np.testing.assert_array_equal(loaded.logprobs(), said)
            loaded.train()
            refused = client.http.delete("training_runs/imported:train:0/checkpoints/weights/theirs")
            assert refused.status_code == 403
    assert folder.is_dir()
    with running(tmp_path / "other") as server:  # the operator brings it no more
        client = Client(server.url, server.key())
        body = {"session_id": client.session(), "model_seq_id": 0, "path": path, "optimizer": False}
        assert client.post("load_weights", body).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [100, 0], ids=["their ids are known", "nothing of them is"])
def test_results_are_forgotten_and_requests_are_not_done_again(tmp_path, forgotten):
    with running(tmp_path, TinkerLimits(futures=2, forgotten=forgotten, checkpoint_steps=1, **QUICK)) as server:
        client = Client(server.url, server.key())
        model = client.model()
        model.train(3)
        old = model.computes(data_of(0), seq_id=1)
        sampler = client.sampler(base_model=TINY)
        for number in range(4):
            client.sample(sampler, [1, 2], number, max_tokens=2)
        before = model.logprobs()
        for _ in range(2):  # a result is forgotten before its request is
            server.do(server.server.service.sweep)
        gone = client.post("retrieve_future", {"request_id": old})
        assert gone.status_code == (410 if forgotten else 404), gone.text
        body = {"model_id": model.model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
        again = client.post("optim_step", body)
        assert again.status_code == (200 if forgotten else 410), again.text
        np.testing.assert_array_equal(model.logprobs(), before)
        count = "SELECT count(*) FROM requests WHERE state = 'forgotten'"
        rows = server.do(lambda: server.server.service.journal.db.read(lambda c: c.exec_driver_sql(count).scalar_one()))
        assert rows <= (100 if forgotten else 4)  # those which the model would be restored with
