"""How a job takes the connection of a program on another machine, and what a process in a bundle may use."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from palestra_control.jobs import ProcessResources
from palestra_service.jobs.launcher import BundleOrder
from palestra_service.ray import process_host
from palestra_service.ray.process_host import Bundles, _accepted, _interface, _variables

SECRET = bytes(range(32))
ORDER = BundleOrder(role="engine", node="n1", resources=ProcessResources(cpus=2.5), memory_gib=1.5)


async def test_only_a_connection_that_shows_the_secret_is_taken_and_others_hold_up_nobody():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.ensure_future(_accepted(listener, SECRET))
        silent, wrong, right = (socket.create_connection(listener.getsockname()) for _ in range(3))
        with silent, wrong, right:
            wrong.sendall(SECRET[::-1])
            wrong.setblocking(False)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(wrong, 1), 10) == b"", "it was closed"
            assert not accepting.done()
            for part in (SECRET[:7], SECRET[7:]):
                right.sendall(part)
                await asyncio.sleep(0.01)
            with await asyncio.wait_for(accepting, 10) as taken:
                assert taken.getpeername() == right.getsockname()
            silent.setblocking(False)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(silent, 1), 10) == b""


async def test_a_start_that_is_broken_off_leaves_no_connection_open():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.ensure_future(_accepted(listener, SECRET))
        with socket.create_connection(listener.getsockname()) as waits:
            await asyncio.sleep(0.05)
            accepting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await accepting
            waits.settimeout(10)
            assert waits.recv(1) == b""


async def test_a_job_that_can_take_no_connection_says_so_and_does_not_wait(monkeypatch):
    async def no_files_left(_: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", no_files_left, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="Too many"):
        await asyncio.wait_for(_accepted(listener, SECRET), 10)


@pytest.mark.service
def test_a_runner_in_a_bundle_is_ended_when_it_uses_more_memory_than_it_holds(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("runner_in_bundle.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert "GiB of memory, and its bundle has 0.001; give it more memory_gib" in done.stdout


async def test_a_start_that_is_broken_off_ends_an_actor_that_is_being_made_and_empties_the_bundle(
    monkeypatch, tmp_path
):
    begun, go, ended = threading.Event(), threading.Event(), list[str]()

    def make(*_: object, **__: object) -> str:
        begun.set()
        assert go.wait(10)
        return "the actor"

    bundles = Bundles(None, {3: ORDER}, (), tmp_path, "127.0.0.1")
    monkeypatch.setattr(bundles, "actor", make)
    monkeypatch.setattr(process_host.ray, "kill", ended.append)
    starting = asyncio.ensure_future(bundles.start("module", {}))
    assert await asyncio.to_thread(begun.wait, 10)
    starting.cancel()
    asyncio.get_running_loop().call_soon(go.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ended == ["the actor"]
    assert bundles.empty().get_nowait() == 3


def test_the_interface_of_an_address_is_named_to_gloo_and_nccl():
    assert set(_interface("127.0.0.3").values()) == {"lo"}
    assert _interface("203.0.113.1") == {}  # an address that this machine does not have


def test_a_program_is_told_how_much_it_has():
    found = _variables(ORDER)
    assert (found["PALESTRA_CORES"], found["PALESTRA_MEMORY_GIB"]) == ("2", "1.5")
