"""What bad input gets, over the wire: the exact status, OpenAI's error shape, and no retry by the openai client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from servers import KEY, Job, Plane, until

MAX_BODY, MAX_CONTEXT = 20_000, 200
SETTINGS = {
    "steps": 100,
    "engine": {"kind": "fake"},
    "policies": {"policy": {"max_context": MAX_CONTEXT}},
    "server": {"max_body_bytes": MAX_BODY},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("bad-input"), SETTINGS) as job:
        job.start()
        yield job


@pytest.fixture(scope="module")
def plane(job) -> Iterator[Plane]:
    with Plane(job.url) as plane:
        yield plane


@pytest.fixture
def episode(plane) -> dict[str, Any]:
    """An episode of its own for each test, claimed."""
    return plane.claim()


def refused(response: httpx2.Response, status: int, *words: str, field: str | None = None) -> None:
    """The answer has this status, OpenAI's shape, and one line that says these words."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert [word for word in words if word not in error["message"]] == [], error["message"]
    if field is not None:
        assert error["param"] == field
    assert response.headers["x-should-retry"] == ("true" if status == 429 else "false")


# Keys

JOB_ROUTES = [
    ("POST", "/claim_episode", {"request_id": "r"}),
    ("POST", "/register_episode", {"request_id": "r", "task": {"data": {}}}),
    ("POST", "/tasks", {"chunk_id": "c", "tasks": []}),
    ("GET", "/rollout", None),
    ("GET", "/status", None),
    ("GET", "/events", None),
    ("GET", "/metrics", None),
    ("POST", "/v1/checkpoints/policy@step-1", {}),
    ("POST", "/engine/replicas", {"replicas": 2}),
    ("GET", f"/pictures/{'0' * 64}", None),
]
EPISODE_ROUTES = [
    ("/heartbeat_episode", {}),
    ("/end_episode", {"reward": 1.0}),
    ("/abort_episode", {}),
]
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


def send(plane: Plane, method: str, path: str, body: Any, key: str | None) -> httpx2.Response:
    return plane.get(path, key) if method == "GET" else plane.post(path, body, key)


@pytest.mark.parametrize("key", [None, "", "nonsense", "pj-0", "pe-adhoc-0.1.0", "pe-ä"])
def test_no_key_or_an_unknown_one_is_401_on_every_route(plane, episode, key):
    headers = {"authorization": f"Bearer {key}".encode()} if key else {}
    chat = ("POST", "/v1/chat/completions", CHAT)
    on_episode = [("POST", path, body | {"episode_id": episode["episode_id"]}) for path, body in EPISODE_ROUTES]
    reading = [("GET", "/v1/models", None), ("GET", "/episode_calls", None)]
    for method, path, body in [*JOB_ROUTES, *on_episode, chat, *reading]:
        if method == "GET":
            refused(plane.get(path, None, headers=headers), 401, "key")
        else:
            refused(plane.post(path, body, None, headers=headers), 401, "key")


@pytest.mark.parametrize(("method", "path", "body"), JOB_ROUTES)
def test_an_episodes_key_on_a_route_of_the_job_is_403(plane, episode, method, path, body):
    refused(send(plane, method, path, body, episode["api_key"]), 403, "key of an episode")


@pytest.mark.parametrize(("path", "body"), [*EPISODE_ROUTES, ("/v1/chat/completions", CHAT)])
def test_the_jobs_key_on_a_route_of_an_episode_is_403(plane, episode, path, body):
    named = body if path.startswith("/v1") else body | {"episode_id": episode["episode_id"]}
    refused(plane.post(path, named, KEY), 403, "key")


@pytest.mark.parametrize(("path", "body"), EPISODE_ROUTES)
def test_the_key_of_one_episode_does_not_open_another(plane, episode, path, body):
    other = plane.claim()
    refused(plane.post(path, body | {"episode_id": other["episode_id"]}, episode["api_key"]), 403, "not the key")
    assert plane.end(other).status_code == 200


def test_a_key_of_an_earlier_claim_cant_be_made_into_one_of_a_later(plane, episode):
    forged = episode["api_key"].replace(".1.", ".2.")
    assert forged != episode["api_key"]
    refused(plane.end(episode, key=forged), 401)


# What does not exist


@pytest.mark.parametrize(("path", "body"), EPISODE_ROUTES)
@pytest.mark.parametrize("key", ["job", "episode"])
def test_an_unknown_episode_is_404(plane, episode, path, body, key):
    sent = KEY if key == "job" else episode["api_key"]
    refused(plane.post(path, body | {"episode_id": "train-999999-00"}, sent), 404, "train-999999-00")


def test_claiming_an_unknown_episode_is_404(plane):
    refused(plane.post("/claim_episode", {"request_id": "unknown", "episode_id": "nobody"}), 404, "nobody")


def test_an_unknown_model_is_404_and_the_answer_names_those_there_are(plane, episode):
    refused(plane.chat(episode | {"model": "gpt-4o"}), 404, "gpt-4o", "policy")


# Leases


def test_whatever_a_worker_sends_after_its_lease_ran_out_is_409(plane):
    late = plane.claim(allow_discard_timeout=0.2)
    assert plane.chat(late).status_code == 200
    again = {"request_id": "second", "episode_id": late["episode_id"]}
    found = until(lambda: (r := plane.post("/claim_episode", again)).status_code == 200 and r, "claimable again")
    new = found.json()["episode"]
    assert new["api_key"] != late["api_key"]
    refused(plane.chat(late), 409, "claim again")
    refused(plane.end(late), 409, "claim again")
    for path in ("/heartbeat_episode", "/abort_episode"):
        refused(plane.post(path, {"episode_id": late["episode_id"]}, late["api_key"]), 409, "claim again")
    assert plane.chat(new).status_code == 200
    assert plane.end(new, 0.5).status_code == 200
    refused(plane.end(late, 0.5), 409)


def test_a_second_claim_of_a_claimed_episode_is_409(plane, episode):
    body = {"request_id": "another", "episode_id": episode["episode_id"]}
    refused(plane.post("/claim_episode", body), 409, "claimed")


def test_after_its_end_an_episode_takes_nothing_more(plane, episode):
    assert plane.end(episode).status_code == 200
    refused(plane.chat(episode), 409, "completed")
    for path in ("/heartbeat_episode", "/abort_episode"):
        refused(plane.post(path, {"episode_id": episode["episode_id"]}, episode["api_key"]), 409, "completed")


def test_ending_twice_is_200_for_the_same_body_and_409_for_another_reward(job, plane, episode):
    answers = [plane.end(episode, 0.25) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    refused(plane.end(episode, 0.5), 409, "another body")
    rows = job.query("SELECT rewards FROM episodes WHERE episode_id = ?", episode["episode_id"])
    assert [json.loads(row["rewards"]) for row in rows] == [{"agent": 0.25}]


# Rewards


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "null", "[1]", "{}"])
@pytest.mark.parametrize("place", ["reward", "rewards", "step_rewards"])
def test_a_reward_that_is_not_a_finite_number_is_422_and_ends_nothing(plane, episode, reward, place):
    value = {"reward": reward, "rewards": f'{{"agent": {reward}}}', "step_rewards": f"[{reward}]"}[place]
    also = '"reward": 1.0, ' if place == "step_rewards" else ""
    body = f'{{"episode_id": "{episode["episode_id"]}", {also}"{place}": {value}}}'.encode()
    sent = {"headers": {"content-type": "application/json"}, "content": body}
    refused(plane.post("/end_episode", None, episode["api_key"], **sent), 422, "reward")
    assert plane.end(episode, 0).status_code == 200


@pytest.mark.parametrize("more", [{}, {"reward": 1.0, "rewards": {"agent": 1.0}}])
def test_a_reward_is_given_once_and_in_one_form(plane, episode, more):
    refused(plane.post("/end_episode", {"episode_id": episode["episode_id"], **more}, episode["api_key"]), 422)


def test_an_unknown_key_in_a_body_is_422_and_named(plane, episode):
    body = {"episode_id": episode["episode_id"], "reward": 1.0, "rewrad": 2.0}
    refused(plane.post("/end_episode", body, episode["api_key"]), 422, "rewrad", field="rewrad")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ('{"a": NaN}', "metadata"),
        ('{"a": 1e999}', "metadata"),
        ('{"a": "\\ud800"}', "JSON"),
        (f'{{"a": {10**30}}}', "metadata"),
        ("[1]", "metadata"),
    ],
    ids=str,
)
def test_metadata_that_cant_be_given_back_as_it_came_is_422(plane, episode, metadata, says):
    body = f'{{"episode_id": "{episode["episode_id"]}", "reward": 1.0, "metadata": {metadata}}}'.encode()
    sent = {"headers": {"content-type": "application/json"}, "content": body}
    refused(plane.post("/end_episode", None, episode["api_key"], **sent), 422, says)


# Bodies


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/end_episode"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b'{"a": 1,}', b"[]", b"\xff\xfe", b"[" * 5000], ids=lambda body: repr(body[:20])
)
def test_malformed_json_is_422(plane, episode, path, body):
    sent = {"headers": {"content-type": "application/json"}, "content": body}
    refused(plane.post(path, None, episode["api_key"], **sent), 422)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/end_episode", "/tasks"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(plane, episode, path, chunked):
    def pieces() -> Iterator[bytes]:
        for _ in range(MAX_BODY // 1000 + 1):
            yield b" " * 1000

    sent = {"headers": {"content-type": "application/json"}, "content": pieces() if chunked else b"".join(pieces())}
    key = KEY if path == "/tasks" else episode["api_key"]
    refused(plane.post(path, None, key, **sent), 413, str(MAX_BODY))


@pytest.mark.parametrize("tokens", [MAX_CONTEXT - 10, MAX_CONTEXT, 2 * MAX_CONTEXT])
def test_a_prompt_over_the_context_is_400_and_the_answer_has_both_numbers(plane, episode, tokens):
    overhead = plane.chat(episode, "").json()["usage"]["prompt_tokens"]
    assert plane.chat(episode, "x" * (MAX_CONTEXT - overhead - 1)).status_code == 200
    refused(plane.chat(episode, "x" * tokens), 400, str(tokens + overhead), str(MAX_CONTEXT))


UNSUPPORTED: list[tuple[str, Any]] = [
    ("functions", [{"name": "add"}]),
    ("function_call", "auto"),
    ("modalities", ["audio"]),
    ("web_search_options", {}),
    ("some_new_field", 1),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=[name for name, _ in UNSUPPORTED])
def test_a_field_that_is_not_supported_is_400_and_named(plane, episode, name, value):
    refused(plane.post("/v1/chat/completions", CHAT | {name: value}, episode["api_key"]), 400, name, field=name)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "digest": "0" * 64}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    ],
    ids=["image_url", "image", "audio", "function_call"],
)
def test_content_other_than_text_is_400_and_never_dropped(plane, episode, message):
    messages = [{"role": "user", "content": "look"}, message]
    body = {"model": "policy", "messages": messages}
    refused(plane.post("/v1/chat/completions", body, episode["api_key"]), 400, "messages.1")


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "wizard", "content": "hello"}]},
        {"messages": [{"content": "hello"}]},
        {"messages": [{"role": "user", "content": [{"type": [], "text": "hello"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {}}]}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"max_tokens": 0},
        {"max_tokens": "12"},
        {"temperature": -1},
        {"model": None},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_422(plane, episode, change):
    refused(plane.post("/v1/chat/completions", CHAT | change, episode["api_key"]), 422, next(iter(change)))


def test_an_unknown_route_has_the_same_shape(plane):
    answer = plane.post("/v1/embeddings", {})
    assert answer.status_code == 404
    assert answer.json()["error"].keys() == {"message", "type", "code", "param"}


# The official client

Call = Callable[[openai.OpenAI], object]


def chat_with(**change: Any) -> Call:
    return lambda ai: ai.chat.completions.create(**({"model": "policy", "messages": CHAT["messages"]} | change))


CLASSES: list[tuple[str, Call, type[openai.APIStatusError], int]] = [
    ("unsupported", chat_with(modalities=["audio"]), openai.BadRequestError, 400),
    ("context", chat_with(messages=[{"role": "user", "content": "x" * 999}]), openai.BadRequestError, 400),
    ("unknown key", lambda ai: chat_with()(ai.with_options(api_key="?")), openai.AuthenticationError, 401),
    ("job key", lambda ai: chat_with()(ai.with_options(api_key=KEY)), openai.PermissionDeniedError, 403),
    ("model", chat_with(model="gpt-4o"), openai.NotFoundError, 404),
    ("wrong type", chat_with(temperature=9), openai.UnprocessableEntityError, 422),
]


@pytest.mark.parametrize(("call", "kind", "status"), [c[1:] for c in CLASSES], ids=[c[0] for c in CLASSES])
def test_the_openai_client_raises_the_right_class_and_does_not_retry(episode, call, kind, status):
    with openai.OpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=5) as ai:
        with pytest.raises(kind) as caught:
            call(ai)
        assert_told_once(caught.value, status)


async def test_a_conflict_is_not_retried_by_the_openai_client_either(plane, episode):
    assert plane.end(episode).status_code == 200
    async with openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=5) as ai:
        with pytest.raises(openai.ConflictError) as caught:
            await ai.chat.completions.create(**CHAT)
        assert_told_once(caught.value, 409)


def assert_told_once(error: openai.APIStatusError, status: int) -> None:
    assert error.status_code == status
    assert error.response.request.headers["x-stainless-retry-count"] == "0"
    assert isinstance(error.body, dict)
    assert error.body.keys() == {"message", "type", "code", "param"}
    assert error.body["message"] in error.message


@pytest.mark.parametrize("rewards", [{}, {"": 1.0}, {f"a{k}": 1.0 for k in range(1001)}], ids=["none", "", "1001"])
def test_rewards_are_those_of_at_least_one_agent_and_of_no_more_than_can_be(plane, episode, rewards):
    ended = {"episode_id": episode["episode_id"], "rewards": rewards}
    refused(plane.post("/end_episode", ended, episode["api_key"]), 422, "rewards")
    assert plane.end(episode).status_code == 200, "it is still open"


@pytest.mark.parametrize("step", ["9" * 5000, "1000001", "-1", "1.0", "\u0661".encode(), ""])
def test_a_step_that_is_none_is_422(plane, episode, step):
    refused(plane.chat(episode, headers={"x-palestra-step": step}), 422, "TimeStep", field="x-palestra-step")
