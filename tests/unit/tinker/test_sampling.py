"""Samples over HTTP: of base models, of saved weights, with what ends them, and the logprobs of prompts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from palestra.models.causal_lm import load_tokenizer
from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.messages import datum
from unit.tinker.serving import TINY, Client, Failed, running

pytestmark = pytest.mark.ci

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(
        tmp_path_factory.mktemp("tinker"), TinkerLimits(poll_seconds=5.0, samples=50), loaded_adapters=2
    ) as started:
        yield started


@pytest.fixture
def ada(server):
    client = Client(server.url, server.key("ada"))
    yield client
    if client.session_id:  # its models and samplers make room for those of other tests
        client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})


def tokens(sequence) -> list[int]:
    return np.frombuffer(sequence.tokens, "<i4").tolist()


def logprobs(sequence) -> np.ndarray:
    return np.frombuffer(sequence.logprobs, "<f4")


def scored(ada, model, prompt, reply) -> np.ndarray:
    """What the trainer says of a reply."""
    row = [*prompt, *reply]
    output = model.output(model.computes([datum(row[:-1], row[1:])], forward_only=True))
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")[len(prompt) - 1 :]


def test_samples_of_saved_weights_have_the_logprobs_that_the_trainer_computes(ada):
    model = ada.model(rank=8)
    model.train(3, rate=5e-2)
    sampler = ada.sampler(model_path=model.samples_as("three"))
    found = ada.sample(sampler, PROMPT, samples=4, max_tokens=6, seed=3, topk_sample_logprobs=3)
    assert len(found.sequences) == 4
    assert len({tuple(tokens(one)) for one in found.sequences}) > 1
    for one in found.sequences:
        np.testing.assert_allclose(logprobs(one), scored(ada, model, PROMPT, tokens(one)), atol=1e-4)
        top = one.topk_sampled_logprobs
        assert (top.k, top.length) == (3, len(tokens(one)))
        assert np.frombuffer(top.logprobs, "<f4").reshape(-1, 3)[:, 0] == pytest.approx(
            np.frombuffer(top.logprobs, "<f4").reshape(-1, 3).max(axis=1)
        )
    before = ada.sample(sampler, PROMPT, 1, max_tokens=6, temperature=0.0)
    model.train(3, rate=5e-2)
    assert ada.sample(sampler, PROMPT, 2, max_tokens=6, temperature=0.0) == before  # a snapshot does not move


def test_weights_without_a_name_are_a_sampler_of_the_session(server, ada):
    model = ada.model()
    model.train()
    answer = ada.result(model.ask("save_weights_for_sampler", sampling_session_seq_id=40))
    sampler = answer["sampling_session_id"]
    assert (answer["path"], sampler) == (None, f"{ada.session_id}:sample:40")
    found = ada.sample(sampler, PROMPT, max_tokens=5, seed=1)
    np.testing.assert_allclose(
        logprobs(found.sequences[0]), scored(ada, model, PROMPT, tokens(found.sequences[0])), atol=1e-4
    )
    assert ada.http.get(f"samplers/{sampler}").json() == {"sampler_id": sampler, "base_model": TINY, "model_path": None}
    folder = server.do(lambda: server.server.service.saved.sampler("ada", sampler)).folder
    assert folder.is_dir()
    ada.good(f"sessions/{ada.session_id}/finish", {"reason": {"type": "success"}})
    assert not folder.exists()
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": []}}
    assert ada.post("asample", body).status_code == 404


def test_a_new_adapter_samples_as_its_base_does(ada):
    one, other = ada.sampler(base_model=TINY), ada.sampler(model_path=ada.model().samples_as("zero"))
    first, second = (ada.sample(s, PROMPT, samples=3, max_tokens=8, seed=11) for s in (one, other))
    assert [tokens(s) for s in first.sequences] == [tokens(s) for s in second.sequences]


def test_prompts_are_scored_as_the_trainer_scores_them(ada):
    model = ada.model()
    model.train(2)
    sampler = ada.sampler(model_path=model.samples_as("two"))
    prompt = [*PROMPT, 9, 10, 11]
    found = ada.sample(sampler, prompt, max_tokens=1, prompt_logprobs=True)
    whole = np.frombuffer(found.prompt_logprobs, "<f4")
    assert np.isnan(whole[0])
    np.testing.assert_allclose(whole[1:], scored(ada, model, prompt[:1], prompt[1:]), atol=1e-4)
    some = ada.sample(sampler, prompt, 1, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=2)
    last = np.frombuffer(some.prompt_logprobs, "<f4")
    assert np.isnan(last[:-2]).all()
    np.testing.assert_array_equal(last[-2:], whole[-2:])


def test_what_ends_a_reply_is_its_last_token(ada):
    sampler, tokenizer = ada.sampler(base_model=TINY), load_tokenizer(TINY)
    plain = tokens(ada.sample(sampler, PROMPT, 0, max_tokens=40, seed=5, stop=[]).sequences[0])
    assert len(plain) == 40
    wanted = plain[10]
    by_id = ada.sample(sampler, PROMPT, 1, max_tokens=40, seed=5, stop=[wanted]).sequences[0]
    assert (tokens(by_id), by_id.stop_reason) == (plain[: plain.index(wanted) + 1], 0)
    text = tokenizer.decode(plain)
    place = next(
        i for i in range(5, 30) if len(tokenizer.decode(plain[: i + 2])) > len(tokenizer.decode(plain[:i])) + 1
    )
    stop = tokenizer.decode(plain[place : place + 2])
    assert stop in text
    by_text = ada.sample(sampler, PROMPT, 2, max_tokens=40, seed=5, stop=[stop]).sequences[0]
    found = tokens(by_text)
    assert by_text.stop_reason == 0
    assert found == plain[: len(found)]
    assert stop in tokenizer.decode(found)
    assert stop not in tokenizer.decode(found[:-1])
    cut = ada.sample(sampler, PROMPT, 3, max_tokens=3, seed=5, stop=[]).sequences[0]
    assert (tokens(cut), cut.stop_reason) == (plain[:3], 1)


def test_the_end_of_a_text_ends_a_reply_unless_nothing_is_to_end_it(ada):
    sampler, eos = ada.sampler(base_model=TINY), load_tokenizer(TINY).eos_token_id
    number = 0
    while True:
        found = ada.sample(sampler, PROMPT, number, samples=40, max_tokens=60, seed=number, temperature=1.5)
        ended = [one for one in found.sequences if tokens(one)[-1] == eos]
        if ended:
            break
        number += 1
    assert all(one.stop_reason == 0 and tokens(one).count(eos) == 1 for one in ended)


def test_a_seed_repeats_and_no_seed_does_not(ada):
    sampler = ada.sampler(base_model=TINY)
    seeded = [ada.sample(sampler, PROMPT, n, samples=2, max_tokens=8, seed=4) for n in (0, 1)]
    assert seeded[0] == seeded[1]
    free = [tokens(ada.sample(sampler, PROMPT, n, max_tokens=12).sequences[0]) for n in (2, 3)]
    assert free[0] != free[1]


def test_the_same_request_is_answered_once(ada):
    sampler = ada.sampler(base_model=TINY)
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 8},
    }
    answers = [ada.good("asample", body) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert ada.result(answers[0]["request_id"]) == ada.result(answers[0]["request_id"])


@pytest.mark.slow
def test_more_adapters_than_the_engine_keeps_come_back(server, ada):
    model = ada.model()
    paths = []
    for number in range(4):
        model.train(1, rate=5e-2)
        paths.append(ada.sampler(model_path=model.samples_as(f"v{number}")))
    first = [ada.sample(s, PROMPT, 0, max_tokens=8, temperature=0.0) for s in paths]
    assert len(server.server.shared.adapters.names) <= 2
    again = [ada.sample(s, PROMPT, 1, max_tokens=8, temperature=0.0) for s in paths]
    assert first == again


def long_request(client: Client) -> str:
    """Ask for samples that take longer than the test."""
    body = {
        "sampling_session_id": client.sampler(base_model=TINY),
        "seq_id": 0,
        "num_samples": 50,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 2000, "stop": []},
    }
    return client.good("asample", body)["request_id"]


def test_a_request_can_be_cancelled(ada):
    request_id = long_request(ada)
    ada.good("cancel_future", {"request_id": request_id})
    with pytest.raises(Failed, match="was cancelled"):
        ada.result(request_id)


def test_what_a_session_still_samples_is_dropped_when_it_ends(ada):
    ada.session()
    request_id = long_request(ada)
    ada.good(f"sessions/{ada.session_id}/finish", {"reason": {}})
    with pytest.raises(Failed, match=r"session.*ended"):
        ada.result(request_id)
    ada.session()


def test_samples_of_a_client_that_is_gone_are_dropped_and_those_of_others_stay(tmp_path):
    with running(tmp_path, TinkerLimits(poll_seconds=0.1, silent_seconds=1.0)) as server:
        gone, alive = (Client(server.url, server.key(tenant)) for tenant in ("ada", "ben"))
        requests = [long_request(client) for client in (gone, alive)]
        time.sleep(1.1)
        alive.good("session_heartbeat", {"session_id": alive.session_id})
        server.do(server.server.service.sweep)
        with pytest.raises(Failed, match=r"heartbeat.*1"):
            gone.result(requests[0])
        assert alive.good("retrieve_future", {"request_id": requests[1]})["type"] == "try_again"
        assert gone.good("session_heartbeat", {"session_id": gone.session_id})  # it may come back


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"sampling_session_id": "x"}, 404, "no sampling session 'x'"),
        ({"prompt": {"chunks": []}}, 422, "prompt has 0 tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 2048}]}}, 422, "prompt has 2048 tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**6]}]}}, 422, "no token 1000000"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, 422, "a chunk of type 'image'"),
        ({"num_samples": 51}, 422, "num_samples is 51, and at most 50"),
        ({"num_samples": 0}, 422, "num_samples"),
        ({"sampling_params": {"temperature": -1}}, 422, "temperature"),
        ({"sampling_params": {"top_p": 0}}, 422, "top_p"),
        ({"sampling_params": {"top_k": 2**63}}, 422, "top_k"),
        ({"sampling_params": {"stop": [""]}}, 422, "1 to 256 characters"),
        ({"sampling_params": {"max_tokens": 0}}, 422, "max_tokens"),
        ({"topk_prompt_logprobs": 3}, 422, "topk_prompt_logprobs is not supported"),
        ({"record_stability_info": True}, 422, "there are cross_entropy, importance_sampling"),
        ({"prompt_logprobs_last_n": 2}, 422, "prompt_logprobs_last_n needs"),
        ({"seq_id": -1}, 422, "seq_id"),
    ],
)
def test_what_can_not_be_sampled_is_refused(ada, change, status, said):
    sampler = ada.sampler(base_model=TINY)
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": PROMPT}]}}
    answer = ada.post("asample", body | change)
    assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text


def test_a_sampler_is_of_something_that_is_served(ada):
    ada.session()
    start = {"session_id": ada.session_id, "sampling_session_seq_id": 0}
    path = ada.model().samples_as("one")
    for body, status, said in (
        (start, 422, "either base_model or model_path"),
        (start | {"base_model": "gpt-7"}, 404, "is not served here"),
        (start | {"model_path": "tinker://x/weights/y"}, 404, "no checkpoint"),
        (start | {"model_path": path, "base_model": "other"}, 422, "of tiny-random, and base_model is other"),
    ):  # fmt: skip
        answer = ada.post("create_sampling_session", body)
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text


def test_weights_without_a_name_replace_no_other_sampler(server, ada):
    """Their folder would stay on the disk for ever."""
    model = ada.model()
    model.train()
    first = ada.result(model.ask("save_weights_for_sampler", sampling_session_seq_id=7))["sampling_session_id"]
    folder = server.do(lambda: server.server.service.saved.sampler("ada", first)).folder
    with pytest.raises(Failed, match=r"sampler.*7"):
        ada.result(model.ask("save_weights_for_sampler", sampling_session_seq_id=7))
    body = {"session_id": ada.session_id, "sampling_session_seq_id": 7, "base_model": TINY}
    assert ada.post("create_sampling_session", body).status_code == 422
    assert server.do(lambda: server.server.service.saved.sampler("ada", first)).folder == folder
    body["sampling_session_seq_id"] = 8
    assert [ada.good("create_sampling_session", body)["sampling_session_id"] for _ in range(2)] == [
        f"{ada.session_id}:sample:8"
    ] * 2, "a request that is sent again is the same"


def test_weights_without_a_name_that_are_asked_for_again_with_another_number_are_the_same(ada):
    """The SDK counts its samplers anew whenever it repeats the request."""
    model = ada.model()
    first = model.ask("save_weights_for_sampler", sampling_session_seq_id=3)
    body = {"sampling_session_seq_id": 4, "seq_id": model.seq_id, "model_id": model.model_id}
    assert ada.good("save_weights_for_sampler", body)["request_id"] == first
    assert ada.result(first)["sampling_session_id"].endswith(":sample:3")
    assert ada.post("save_weights_for_sampler", body | {"path": "named"}).status_code == 422


def test_weights_without_a_name_count_as_samplers_of_their_session(tmp_path):
    with running(tmp_path, TinkerLimits(poll_seconds=5.0, samplers=2)) as server:
        ada = Client(server.url, server.key("ada"))
        model = ada.model()
        for number in range(2):
            ada.result(model.ask("save_weights_for_sampler", sampling_session_seq_id=number))
        with pytest.raises(Failed, match=r"2.*samplers"):
            ada.result(model.ask("save_weights_for_sampler", sampling_session_seq_id=2))


def test_a_result_that_no_journal_can_keep_is_not_sampled(tmp_path):
    """A result that SQLite refuses would end the server, again at each start."""
    with running(tmp_path, TinkerLimits(poll_seconds=5.0, sample_bytes=8 * 4 * 10 * 3)) as server:
        ada = Client(server.url, server.key("ada"))
        body = {
            "sampling_session_id": ada.sampler(base_model=TINY),
            "num_samples": 4,
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 10},
            "topk_sample_logprobs": 2,
        }
        ada.good("asample", body | {"seq_id": 0})
        wrong = ({"topk_sample_logprobs": 3}, {"num_samples": 5}, {"sampling_params": {"max_tokens": 11}})
        for change in (*wrong, {"sampling_params": {}}):
            answer = ada.post("asample", body | {"seq_id": 1} | change)
            assert (answer.status_code, "bytes" in answer.json()["error"]) == (422, True), answer.text


def test_a_tenant_may_have_so_many_sequences_to_be_sampled_and_others_are_not_kept_from_theirs(tmp_path):
    with running(tmp_path, TinkerLimits(poll_seconds=5.0, waiting_samples=20)) as server:
        ada, ben = (Client(server.url, server.key(tenant)) for tenant in ("ada", "ben"))
        long = {
            "sampling_session_id": ada.sampler(base_model=TINY),
            "num_samples": 12,
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 2000, "stop": []},
        }
        first = ada.good("asample", long | {"seq_id": 0})["request_id"]
        refused = ada.post("asample", long | {"seq_id": 1})
        assert (refused.status_code, "12 sequences of this key" in refused.json()["error"]) == (429, True)
        assert ada.good("asample", long | {"seq_id": 0})["request_id"] == first, "one that is sent again is the same"
        fits = ada.good("asample", long | {"seq_id": 2, "num_samples": 8})["request_id"]
        assert ben.sample(ben.sampler(base_model=TINY), PROMPT, samples=20, max_tokens=2)
        for request_id in (first, fits):
            ada.good("cancel_future", {"request_id": request_id})
        assert ada.sample(long["sampling_session_id"], PROMPT, 1, samples=12, max_tokens=2)


def test_what_is_said_of_a_session_has_numbers_that_can_be_kept(ada):
    answer = ada.post("create_session", {"user_metadata": {"number": 10**30}})
    assert (answer.status_code, "user_metadata" in answer.json()["error"]) == (422, True), answer.text
