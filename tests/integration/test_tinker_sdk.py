"""The unmodified Tinker SDK as a client: every call that it has for a loop, and the errors that it raises."""

from __future__ import annotations

import gc
import math
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from unit.tinker.serving import TINY, running

from palestra_bases.tinker.records import TinkerLimits

os.environ["TINKER_TELEMETRY"] = "0"
tinker = pytest.importorskip("tinker")
types = tinker.types
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TOKENS = list(range(5, 15))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker"), TinkerLimits(poll_seconds=1.0)) as started:
        yield started
        gc.collect()  # connections that the SDK does not close are found here, and not at the end of all tests


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=server.key("ada")) as client:
        yield client


def tensor(values, kind="float32"):
    return types.TensorData(data=list(values), dtype=kind, shape=[len(values)])


def datum(tokens=TOKENS, **inputs):
    given = {"target_tokens": tensor(tokens[1:], "int64")} | {name: tensor(v) for name, v in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


ONES = datum(weights=[1.0] * 9)


def logprobs(output) -> np.ndarray:
    return np.array(output.loss_fn_outputs[0]["logprobs"].data)


def test_a_loop_of_supervised_training(service):
    client = service.create_lora_training_client(base_model=TINY, rank=8, seed=1).result()
    info = client.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (TINY, True, 8)
    assert client.get_tokenizer().encode("a")
    losses = []
    for _ in range(10):
        computed = client.forward_backward([ONES] * 3, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=5e-2))
        losses.append(computed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses[-1] < losses[0]
    output = client.forward([ONES], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(-logprobs(output).sum(), rel=1e-5)


def test_a_loop_of_reinforcement_learning_is_on_policy(service):
    client = service.create_lora_training_client(base_model=TINY, rank=4).result()
    prompt = TOKENS[:3]
    for _ in range(3):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, stop=[])
        found = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params).result()
        assert len({one.sequence_id for one in found.sequences}) == 4
        data = []
        for one in found.sequences:
            row = prompt + list(one.tokens)
            before = [0.0] * (len(prompt) - 1)
            advantages = [*before, *([1.0] * len(one.tokens))]
            data.append(datum(row, logprobs=[*before, *one.logprobs], advantages=advantages))
        output = client.forward_backward(data, "importance_sampling").result()
        assert output.metrics["loss:sum"] == pytest.approx(-24.0, abs=1e-2)  # the ratios are 1
        for one, told in zip(found.sequences, output.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(np.array(told["logprobs"].data)[2:], one.logprobs, atol=1e-4)
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def test_weights_are_downloaded_by_the_sdks_own_command(server, service, tmp_path, monkeypatch):
    commands = pytest.importorskip("tinker.cli.commands.checkpoint")
    client = service.create_lora_training_client(base_model=TINY, rank=4, seed=3).result()
    client.forward_backward([ONES], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("kept").result().path
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key("ada"))
    rest = service.create_rest_client()
    size = commands._download_checkpoint(rest, path, tmp_path, show_progress=False, format="json")
    assert size == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    peft = pytest.importorskip("peft")
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).r == 4


def test_checkpoints_are_copied_and_a_copy_is_trained_on(service):
    client = service.create_lora_training_client(base_model=TINY, rank=4, seed=3).result()
    client.forward_backward([ONES], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    source = client.save_state("kept").result().path
    copied = service.create_rest_client().copy_weights(source, "any-project", ttl_seconds=3600).result()
    assert copied != source
    again = service.create_training_client_from_state(copied)
    found = [logprobs(each.forward([ONES], "cross_entropy").result()) for each in (client, again)]
    np.testing.assert_array_equal(*found)
    shown = client.save_weights_for_sampler("shown").result().path
    archived = service.create_rest_client().copy_weights(shown, "any-project").result()
    params = types.SamplingParams(max_tokens=5, seed=3)
    tokens = [
        service.create_sampling_client(model_path=path)
        .sample(types.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params)
        .result()
        .sequences[0]
        .tokens
        for path in (shown, archived)
    ]
    assert tokens[0] == tokens[1]


def test_many_samples_are_asked_for_with_few_polls_and_a_pickled_client_counts_apart(service):
    sampler = service.create_sampling_client(base_model=TINY)
    params = types.SamplingParams(max_tokens=4, seed=5)

    def ask(client, number: int):
        return [client.sample(types.ModelInput.from_ints(TOKENS), 1, params) for _ in range(number)]

    assert sampler.holder.get_client_config().sample_use_retrieve_futures
    first = [future.result().sequences[0].tokens for future in ask(sampler, 20)]
    assert len({tuple(tokens) for tokens in first}) == 1
    other = pickle.loads(pickle.dumps(sampler))
    assert [future.result().sequences[0].tokens for future in ask(other, 3)] == first[:3]
    assert other._cloned_sampler_id == 1


@pytest.mark.parametrize("few", [False, True], ids=["dense", "sparse"])
def test_several_targets_of_a_position(service, few):
    """As the cookbook's distillation has them: the likeliest tokens of a teacher, most of which weigh nothing."""
    torch = pytest.importorskip("torch")
    client = service.create_lora_training_client(base_model=TINY, rank=4, seed=2).result()
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, 50, (9, 6), generator=generator)
    weights = torch.rand((9, 6), generator=generator)
    if few:
        keep = torch.rand((9, 6), generator=generator) < 0.2
        targets, weights = targets * keep, weights * keep
    given = {"target_tokens": targets, "weights": weights.to(torch.float32)}
    made = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=given)
    assert (made.loss_fn_inputs["weights"].sparse_crow_indices is not None) == few
    output = client.forward_backward([made], "cross_entropy").result()
    told = output.loss_fn_outputs[0]["logprobs"]
    assert told.shape == [9, 6]
    wanted = -(np.array(told.data).reshape(9, 6) * weights.numpy()).sum()
    assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)
    plain = client.forward([datum(weights=[1.0] * 9)], "cross_entropy").result()
    assert logprobs(plain).shape == (9,)


@pytest.mark.parametrize(
    ("loss", "config", "formula"),
    [
        ("importance_sampling", None, lambda p, q, a: -np.exp(p - q) * a),
        ("ppo", None, lambda p, q, a: -np.minimum(np.exp(p - q) * a, np.clip(np.exp(p - q), 0.8, 1.2) * a)),
        (
            "cispo",
            {"clip_low_threshold": 0.2, "clip_high_threshold": 1.5},
            lambda p, q, a: -np.clip(np.exp(p - q), 0.2, 1.5) * a * p,
        ),
        ("dro", {"beta": 0.1}, lambda p, q, a: -(p * a - 0.05 * (p - q) ** 2)),
    ],
)
def test_the_losses_are_sums_of_their_formulas(service, loss, config, formula):
    client = service.create_lora_training_client(base_model=TINY, rank=4, seed=2).result()
    draw = np.random.default_rng(0)
    q, a = -draw.exponential(5.5, 9), draw.normal(0, 1, 9)
    output = client.forward_backward([datum(logprobs=q, advantages=a)], loss, config).result()
    assert output.metrics["loss:sum"] == pytest.approx(formula(logprobs(output), q, a).sum(), rel=1e-4)


def test_a_loss_of_the_user(service):
    client = service.create_lora_training_client(base_model=TINY, rank=4, seed=2).result()
    other = service.create_lora_training_client(base_model=TINY, rank=4, seed=2).result()

    def squared(data, found):
        return (found[0] ** 2).sum(), {"squared:sum": 1.0}

    output = client.forward_backward_custom([ONES], squared).result()
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    p = logprobs(other.forward([ONES], "cross_entropy").result())
    assert output.metrics["loss:sum"] == pytest.approx((p**2).sum(), rel=1e-4)
    other.forward_backward([datum(weights=-2 * p)], "cross_entropy").result()
    same = other.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert stepped.metrics["grad_norm"] == pytest.approx(same.metrics["grad_norm"], rel=1e-4)


def test_more_data_than_one_request_has(service):
    client = service.create_lora_training_client(base_model=TINY, rank=2, seed=2).result()
    output = client.forward_backward([ONES] * 1030, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1030
    assert output.metrics["loss:sum"] == pytest.approx(-1030 * logprobs(output).sum(), rel=1e-3)
    client.optim_step(types.AdamParams()).result()


def test_states_and_listing(service, server):
    client = service.create_lora_training_client(base_model=TINY, rank=4, user_metadata={"run": "x"}).result()
    client.forward_backward([ONES], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("one", user_metadata={"k": "v"}).result().path
    wanted = logprobs(client.forward([ONES], "cross_entropy").result())
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    weights = service.create_training_client_from_state(path).result()
    for one in (whole, weights):
        np.testing.assert_array_equal(logprobs(one.forward([ONES], "cross_entropy").result()), wanted)
    rest = service.create_rest_client()
    run = rest.get_training_run(client.model_id).result()
    assert (run.lora_rank, run.user_metadata, run.last_checkpoint.tinker_path) == (4, {"run": "x"}, path)
    (saved,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (saved.checkpoint_id, saved.user_metadata) == ("weights/one", {"k": "v"})
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert rest.list_user_checkpoints().result().checkpoints[0].expires_at is not None
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert rest.list_training_runs().result().cursor.total_count >= 3
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state(path).result()


def test_samplers(service):
    base = service.create_sampling_client(base_model=TINY).result()
    scored = base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert scored[0] is None
    assert all(math.isfinite(value) and value < 0 for value in scored[1:])
    params = types.SamplingParams(max_tokens=5, seed=1, stop=[], temperature=0.7, top_k=20, top_p=0.9)
    prompt = types.ModelInput.from_ints(TOKENS)
    found = base.sample(prompt, 2, params, topk_sample_logprobs=3).result()
    assert all(len(one.tokens) == 5 and one.stop_reason == "length" for one in found.sequences)
    many = [base.sample(prompt, 1, types.SamplingParams(max_tokens=4)) for _ in range(100)]
    assert all(len(one.result().sequences) == 1 for one in many)


def test_errors_are_those_of_the_sdk(service, server):
    client = service.create_lora_training_client(base_model=TINY, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="no gradient") as failed:
        client.optim_step(types.AdamParams()).result()
    assert failed.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match=r"float32 \[9\]"):
        client.forward_backward([datum(weights=[1.0])], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"advantages.*nan"):
        client.forward_backward([datum(logprobs=[0.0] * 9, advantages=[math.nan] * 9)], "ppo").result()
    with pytest.raises(tinker.NotFoundError, match="not served"):
        service.create_lora_training_client(base_model="gpt-7").result()
    with pytest.raises(tinker.RequestFailedError, match="the smaller"):
        service.create_lora_training_client(base_model=TINY, rank=10_000).result()
    client.forward_backward([ONES], "cross_entropy").result()  # it goes on
    path = client.save_weights_for_sampler("mine").result().path
    with tinker.ServiceClient(base_url=server.url, api_key=server.key("ben")) as ben:
        with pytest.raises(tinker.NotFoundError):
            ben.create_sampling_client(model_path=path).result()
        assert ben.create_rest_client().list_user_checkpoints().result().checkpoints == []


def test_the_script_of_the_documentation_runs(server, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "tinker.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for found, instead in (("SmolLM2-135M-Instruct", TINY), ("range(20)", "range(2)"), (" if r != mean]", "]")):
        assert found in script
        script = script.replace(found, instead)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key("ada"))
    names: dict = {}
    exec(compile(script, "tinker.md", "exec"), names)  # the block of the page, as a reader would run it
    names["service"].close("success").result()
    assert capsys.readouterr().out.rstrip().endswith("/weights/sums")
