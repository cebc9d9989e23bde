"""Which requests to a sampler have results, asked for all of them at once; and several clients of one sampler."""

from __future__ import annotations

import threading

import pytest

from palestra_bases.tinker.records import TinkerLimits
from unit.tinker.serving import TINY, Client, running

CLONE = 1_000_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tinker")) as started:
        yield started


@pytest.fixture
def ada(server):
    return Client(server.url, server.key("ada"))


def begin(client: Client, sampler: str, number: int, **params) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 3, "seed": 1} | params,
    }
    return client.good("asample", body)["request_id"]


def poll(client: Client, sampler: str, cursor: int = 0, clone: int = 0, timeout: float | None = None):
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    found = client.good("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": timeout})
    return found["completions"], found["cursor"]


def test_each_result_is_told_once_with_its_size_and_the_next_poll_waits_for_more(ada):
    sampler = ada.sampler(base_model=TINY)
    asked = [begin(ada, sampler, number) for number in range(5)]
    told, cursor = [], 0
    while len(told) < 5:
        found, cursor = poll(ada, sampler, cursor)
        assert found
        told += found
    assert sorted(one["request_id"] for one in told) == sorted(asked)
    for one in told:
        answer = ada.post("retrieve_future", {"request_id": one["request_id"]})
        assert (one["state"], one["response_payload_uncompressed_size"]) == ("finished", len(answer.content))
    assert poll(ada, sampler, cursor, timeout=0) == ([], cursor)
    again, _ = poll(ada, sampler)
    assert again == told, "a cursor of 0 begins again, in the same order"
    found = []
    waits = threading.Thread(target=lambda: found.extend(poll(ada, sampler, cursor)[0]))
    waits.start()
    late = begin(ada, sampler, 5)
    waits.join(30)
    assert [one["request_id"] for one in found] == [late]


def test_clients_of_one_sampler_have_numbers_and_results_of_their_own(ada):
    sampler = ada.sampler(base_model=TINY)
    joined = [ada.good("join_sampling_session", {"sampling_session_id": sampler})["client_counter"] for _ in range(2)]
    assert joined == [1, 2]
    body = {"session_id": ada.session_id, "sampling_session_seq_id": ada.samplers - 1, "base_model": TINY}
    assert ada.good("create_sampling_session", body)["sampling_session_id"] == sampler  # sent again
    assert ada.good("join_sampling_session", {"sampling_session_id": sampler})["client_counter"] == 3
    mine, theirs = begin(ada, sampler, 0), begin(ada, sampler, 2 * CLONE)
    for clone, request_id in ((0, mine), (2, theirs)):
        found, _ = poll(ada, sampler, clone=clone)
        assert [one["request_id"] for one in found] == [request_id]
    assert poll(ada, sampler, clone=1, timeout=0) == ([], 0)


def test_a_cancelled_request_is_told_as_failed(ada):
    sampler = ada.sampler(base_model=TINY)
    request_id = begin(ada, sampler, 0, max_tokens=2000)
    ada.good("cancel_future", {"request_id": request_id})
    assert poll(ada, sampler)[0] == [{"state": "failed", "request_id": request_id}]


@pytest.mark.slow
def test_a_cursor_is_good_after_the_server_is_started_again(tmp_path):
    with running(tmp_path) as server:
        client = Client(server.url, server.key("ada"))
        sampler = client.sampler(base_model=TINY)
        for number in range(2):
            client.result(begin(client, sampler, number))
        _, cursor = poll(client, sampler)
    with running(tmp_path, TinkerLimits(poll_seconds=5.0, futures=0)) as server:
        client = Client(server.url, server.key("ada"))
        third = begin(client, sampler, 2)
        found, cursor = poll(client, sampler, cursor)
        assert ([one["request_id"] for one in found], cursor) == ([third], 3)
        server.do(server.server.service.sweep)  # which forgets all results
        found, _ = poll(client, sampler)
        assert [(one["state"], one["response_payload_uncompressed_size"]) for one in found] == [("finished", None)] * 3


def test_what_is_asked_wrongly_is_refused(ada):
    sampler = ada.sampler(base_model=TINY)
    for body, status in (
        ({"target": {"sampling_session_id": "session-x:sample:0"}}, 404),
        ({"target": {"type": "model", "sampling_session_id": sampler}}, 422),
        ({"target": {"sampling_session_id": sampler, "cloned_sampler_id": -1}}, 422),
        ({"target": {"sampling_session_id": sampler}, "timeout": -1}, 422),
        ({}, 422),
    ):
        assert ada.post("retrieve_futures", body).status_code == status
    assert ada.post("join_sampling_session", {"sampling_session_id": "session-x:sample:0"}).status_code == 404
