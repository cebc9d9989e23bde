"""Clients on a line that loses, cuts and replaces what is said: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from drawing import examples
from faulty_proxy import FAULTS, FaultyProxy
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from servers import KEY, SCRIPTED, Job, free_port, until

from palestra import AsyncClient, Client, ControlClient
from palestra.client import exchange
from palestra.errors import ConfigError, ConnectionLost

pytestmark = pytest.mark.ci

ENDLESS = SCRIPTED | {"steps": 100_000, "evaluation": {"every_steps": 0}}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("endless"), ENDLESS) as made:
        made.start()
        yield made


def completed(job: Job) -> dict[str, tuple[int, str]]:
    """Fence and rewards of each completed episode."""
    rows = job.query("SELECT episode_id, fence, rewards FROM episodes WHERE state = 'completed'")
    return {row["episode_id"]: (row["fence"], row["rewards"]) for row in rows}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_at_every_request_of_an_episode(job, fault):
    with FaultyProxy(job.url, [fault] * 6) as proxy, Client(proxy.url, KEY, retry_seconds=30) as client:
        episode = client.begin_episode()
        assert episode is not None
        proxy.faults = [fault] * 3
        client.heartbeat(episode)
        proxy.faults = [fault] * 3
        client.end_episode(episode, 0.25)
        assert proxy.hurt == 12
    assert completed(job)[episode.episode_id] == (1, '{"agent":0.25}')


@examples(1, 12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(st.sampled_from(["", "", *FAULTS]), max_size=10))
def test_any_faults_in_any_order(job, faults):
    async def play(url: str) -> list[str]:
        async with AsyncClient(url, KEY, retry_seconds=30) as client:
            played = []
            for _ in range(3):
                async with client.episode() as episode:
                    assert episode is not None
                    episode.reward = 1.0
                played.append(episode.episode_id)
            return played

    with FaultyProxy(job.url, faults) as proxy:
        played = asyncio.run(play(proxy.url))
    found = completed(job)
    assert [found[name] for name in played] == [(1, '{"agent":1.0}')] * 3  # each claimed once, and ended


def test_garbage_for_ever_is_an_error_of_ours(job):
    with FaultyProxy(job.url, ["html"] * 1000) as proxy:
        with (
            Client(proxy.url, KEY, retry_seconds=0.3) as client,
            pytest.raises(ConnectionLost, match=r"answer.*Palestra"),
        ):
            client.begin_episode()
        with (
            ControlClient(proxy.url, KEY, retry_seconds=0.3) as control,
            pytest.raises(ConnectionLost, match=r"answer.*Palestra"),
        ):
            control.submit({})


def test_a_server_that_restarts_is_waited_for_and_told_of_at_once(caplog):
    port = free_port()
    with caplog.at_level(logging.WARNING, "palestra.client"), Client(f"http://127.0.0.1:{port}", "k") as client:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(client.begin_episode()), daemon=True)
        thread.start()
        until(lambda: caplog.messages, "the first failure is told", 2.0)
        assert f"http://127.0.0.1:{port} can't be reached" in caplog.messages[0]
        body = b'{"status": "finished", "job_state": "completed"}'
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        with socket.create_server(("127.0.0.1", port)) as server:
            connection, _ = server.accept()
            connection.recv(10_000)
            connection.sendall(answer)
            connection.close()
        thread.join(10)
        assert found == [None]
        assert "answers again" in caplog.messages[-1]


def test_an_unknown_host_is_told_at_once_and_a_lost_connection_in_the_end(caplog):
    with (
        caplog.at_level(logging.WARNING, "palestra.client"),
        Client("http://nowhere.invalid:7411", "k", retry_seconds=0.5) as client,
        pytest.raises(ConnectionLost, match=r"nowhere\.invalid"),
    ):
        client.begin_episode()
    assert "nowhere.invalid" in caplog.messages[0]


@pytest.fixture
def tls() -> Iterator[int]:
    """The port of a server that answers plain HTTP as TLS servers do: with an alert record."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"\x15\x03\x01\x00\x02\x02\x46\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


@pytest.fixture(autouse=True, scope="module")
def short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "LONGEST_PAUSE_SECONDS", 0.02)
        yield


def test_plain_http_to_a_tls_port_is_told_at_once_and_not_tried_for_minutes(tls):
    with Client(f"http://127.0.0.1:{tls}", KEY) as client, pytest.raises(ConfigError, match="https://"):
        client.begin_episode()


def test_tls_to_a_plain_port_is_told_at_once_and_not_tried_for_minutes(job):
    with Client(job.url.replace("http:", "https:"), KEY) as client, pytest.raises(ConfigError, match="http://"):
        client.begin_episode()
