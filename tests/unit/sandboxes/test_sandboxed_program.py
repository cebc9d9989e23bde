"""What a program in a sandbox can reach, use and leave behind: nothing, little, and files that are only read."""

from __future__ import annotations

import asyncio
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import uvloop
from machine import require

from palestra.errors import ConfigError, EnvironmentFailed
from palestra.sandbox import SandboxSpec, sandbox
from palestra_sandboxes.bubblewrap import program as sandboxes
from palestra_sandboxes.bubblewrap.program import ProgramLimits, check_bubblewrap, start_program
from palestra_sandboxes.child import Descriptors, read_pipe

pytestmark = pytest.mark.ci

require("bwrap", "git")
SMALL = ProgramLimits(memory_mib=256, disk_mib=8, files=500, processes=20, cpu_seconds=2)


async def run_once(command, files, limits, *, seconds, max_bytes=100_000) -> bytes:
    """Return the beginning of a program's output; a program that writes more is killed."""
    with Descriptors() as ours:
        output, written = ours.pipe()
        async with await start_program(command, files, limits, stdin=subprocess.DEVNULL, stdout=written):
            ours.close(written)
            try:
                async with asyncio.timeout(seconds):
                    return await read_pipe(output, max_bytes)
            except TimeoutError:
                return b""


async def said(command: str, files=None, limits: ProgramLimits = SMALL, seconds: float = 10.0) -> str:
    return (await run_once(["bash", "-c", command], files or {}, limits, seconds=seconds)).decode(errors="replace")


async def left(command: str, limits: ProgramLimits = SMALL) -> dict[str, bytes]:
    sandbox = await start_program(
        ["bash", "-c", command], {"a/b": b"hello"}, limits, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    async with sandbox:
        await asyncio.wait_for(sandbox.process.wait(), 20)
        await sandbox.end()
        return await sandbox.read_files()


async def test_files_go_in_and_come_out():
    files = {"one.txt": b"1\n", "deep/er/two.bin": bytes(range(256)), "ümlaut": b""}
    assert await said("find . -type f | sort; cat deep/er/two.bin | wc -c", files) == (
        "./deep/er/two.bin\n./one.txt\n./ümlaut\n256\n"
    )
    assert await left("cat a/b > c; mkdir d; echo x > d/e; rm a/b") == {"c": b"hello", "d/e": b"x\n"}


async def test_there_is_no_network_not_even_this_machine():
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert "ConnectionRefusedError" in await said(f'python3 -c "{code}" 2>&1')
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # the test can fail
    finally:
        server.shutdown()
        server.server_close()
    assert "inet 127.0.0.1" in await said("ip -4 addr")
    assert await said("ip -4 addr | grep -c inet") == "1\n"


async def test_the_machine_is_neither_seen_nor_written(tmp_path):
    (tmp_path / "secret").write_text("secret")
    tried = ["/etc/shadow", "/root", "/home", "/var", "/sys", str(tmp_path), str(Path(__file__).parent), "/run"]
    assert await said(f"for place in {' '.join(tried)}; do ls $place > /dev/null 2>&1 && echo $place; done; true") == ""
    written = "for place in / /usr /etc /dev /usr/bin; do touch $place/x 2> /dev/null && echo $place; done; true"
    assert await said(written) == ""
    assert int(await said("ps -e --no-headers | wc -l")) < 8
    assert await said("id -un") == "agent\n"
    assert await said("unshare -U true 2>/dev/null || echo no") == "no\n"
    assert str(os.getpid()) not in await said("ls /proc")


async def test_links_out_of_the_sandbox_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("secret")
    made = f"ln -s {tmp_path}/secret file; ln -s {tmp_path} folder; ln -s / root; mkfifo pipe; echo 1 > own; rm -r a"
    assert await left(made) == {"own": b"1\n"}


async def test_a_fork_bomb_stays_small_and_ends_with_the_sandbox():
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 60"
    sandbox = await start_program(["bash", "-c", bomb], {}, SMALL, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    async with sandbox:
        await asyncio.sleep(0.5)
        inside = psutil.Process(sandbox.process.pid).children(recursive=True)
        assert 2 < len(inside) <= SMALL.processes + 3  # with those of bubblewrap itself
    assert not [one for one in inside if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


async def test_the_disk_is_small_for_bytes_and_for_files():
    wrote = await said("head -c 20M /dev/zero > big; ls -s --block-size=M big | cut -d' ' -f1; ls -s /tmp | head -1")
    assert "8M" in wrote
    many = await left("for i in $(seq 4000); do : > f$i; done; sleep 5")
    assert len(many) <= SMALL.files


async def test_files_with_holes_are_not_read_into_memory():
    files = await left("for i in $(seq 50); do truncate -s 8M hole$i; done")
    assert sum(map(len, files.values())) <= SMALL.disk_mib * 1024 * 1024


async def test_deep_folders_do_not_hurt_their_reader():
    files = await left("for i in $(seq 300); do mkdir d; cd d; done; echo 1 > bottom; cd /work; echo 2 > top")
    assert files["top"] == b"2\n"
    assert not [path for path in files if path.endswith("bottom")]


async def test_memory_is_limited_for_one_process_and_for_all_together():
    assert "MemoryError" in await said("python3 -c 'bytearray(400 << 20)' 2>&1")
    each = "python3 -c 'import time; x = bytearray(100 << 20); time.sleep(20)' & "
    sandbox = await start_program(
        ["bash", "-c", each * 4 + "wait"], {}, SMALL, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    async with sandbox:
        await asyncio.wait_for(sandbox.process.wait(), 15)
        assert sandbox.ended_for == "more than 256 MiB of memory"


OUTSIDE_OF_PROCESSES = """
import ctypes, mmap, os
c = ctypes.CDLL(None, use_errno=True)
def by(name, *arguments):
    return name, lambda: getattr(c, name)(*arguments) < 0 and os.strerror(ctypes.get_errno())
def python(name, call):
    def tried():
        try:
            call()
        except OSError as error:
            return error.strerror
    return name, tried
zero = os.open("/dev/zero", os.O_RDWR)
for name, tried in (
    python("memfd_create", lambda: os.memfd_create("x")),
    by("shmget", 0, 4096, 0o1600), by("semget", 0, 1, 0o1600), by("msgget", 0, 0o1600),
    python("shared", lambda: mmap.mmap(-1, 4096)),
    python("zero", lambda: mmap.mmap(zero, 4096)),
):
    print(name, tried() or "allowed", sep=": ")
"""


async def test_no_memory_can_be_had_that_belongs_to_no_process():
    refused = "Operation not permitted"
    expected = dict.fromkeys(("memfd_create", "shmget", "semget", "msgget", "shared"), refused)
    printed = await said("python3 a.py 2>&1", {"a.py": OUTSIDE_OF_PROCESSES.encode()})
    found = dict(line.split(": ") for line in printed.splitlines())
    assert found == {**expected, "zero": "No such device"}
    here = subprocess.run([sys.executable, "-c", OUTSIDE_OF_PROCESSES], capture_output=True, text=True, check=True)
    assert [line.split(": ")[1] for line in here.stdout.splitlines()] == ["allowed"] * 6  # the test can fail


async def test_programs_that_share_memory_through_files_still_run():
    script = b"from multiprocessing import Pool\nif __name__ == '__main__': print(Pool(2).map(abs, [-1, -2]))"
    assert await said("python3 a.py 2>&1", {"a.py": script}) == "[1, 2]\n"
    assert await said("head -c 5 /dev/zero | tr '\\0' z") == "zzzzz"


SOCKETS = """
import errno, socket
def tried(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
one, _ = socket.socketpair()
print(tried(lambda: socket.socket(40, socket.SOCK_STREAM)), tried(lambda: socket.socket(38, socket.SOCK_SEQPACKET)))
for option in (7, 8):
    before = one.getsockopt(socket.SOL_SOCKET, option)
    one.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    print(one.getsockopt(socket.SOL_SOCKET, option) == before)
listening = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listening.getsockname()).setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
print("connected")
"""


async def test_sockets_lead_nowhere_and_stay_small():
    """Those between a virtual machine and its host (AF_VSOCK, 40) know no namespaces."""
    assert await said("python3 a.py 2>&1", {"a.py": SOCKETS.encode()}) == "EPERM EPERM\nTrue\nTrue\nconnected\n"
    many = "import socket, time; kept = [socket.socketpair() for _ in range(40)]; time.sleep(20)"
    sandbox = await start_program(
        ["python3", "-c", many], {}, SMALL, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    async with sandbox:
        await asyncio.wait_for(sandbox.process.wait(), 15)
        assert sandbox.ended_for == "more than 64 sockets"


@pytest.mark.parametrize("folder", ["/work", "/tmp"])
async def test_a_sandbox_of_very_many_files_is_ended(folder):
    many = f"cd {folder}; for i in $(seq 4000); do : > f$i; done; sleep 20"
    sandbox = await start_program(["bash", "-c", many], {}, SMALL, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    async with sandbox:
        await asyncio.wait_for(sandbox.process.wait(), 15)
        assert sandbox.ended_for == "more than 500 files"


@pytest.mark.slow
async def test_time_is_limited():
    started = time.monotonic()
    assert (await said("bash -c 'while :; do :; done'; echo $?", seconds=20)).split()[-1] in ("137", "152")
    assert time.monotonic() - started < 15  # two seconds of processor time
    assert await said("sleep 60", seconds=0.3) == ""
    assert time.monotonic() - started < 18


async def test_output_is_cut():
    assert len(await run_once(["yes"], {}, SMALL, seconds=10, max_bytes=1000)) == 1000


async def test_nothing_is_left_not_even_a_descriptor():
    await said("true")
    before, others = psutil.Process().num_fds(), psutil.Process().children()  # others: of tests before this one
    for _ in range(5):
        await said("sleep 100 & echo started; sleep 0.05")
    assert psutil.Process().num_fds() == before
    left = [one for one in psutil.Process().children() if one not in others]
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_it_has_its_own_descriptors_only_on_any_event_loop(new_loop):  # jobs run on uvloop
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            found = runner.run(said("id -u; echo /proc/self/fd/*"))
    finally:
        os.close(reading)
        os.close(writing)
    assert found == "1000\n/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 /proc/self/fd/3\n"  # 3: of the folder itself


@pytest.mark.slow
async def test_a_sandbox_ends_with_the_process_that_made_it():
    script = """
import asyncio, subprocess
from palestra_sandboxes.bubblewrap.program import ProgramLimits, start_program
async def main():
    await start_program(["sleep", "4321"], {}, ProgramLimits(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print("started", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        inside = psutil.Process(process.pid).children(recursive=True)
        assert any("4321" in one.cmdline() for one in inside)
        process.kill()
    _, alive = psutil.wait_procs(inside, timeout=5)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


async def test_what_can_not_be_started_is_a_failure_of_the_environment():
    assert "not found" in await said("no-such-program 2>&1")
    with pytest.raises(EnvironmentFailed, match=r"no sandbox was started|started no program"):
        await run_once(["true"], {"a": b"", "a/b": b""}, SMALL, seconds=5)


def test_a_machine_without_the_library_of_filters_is_told_which_one(monkeypatch):
    monkeypatch.setattr(sandboxes, "has_filters", lambda: False)
    with pytest.raises(ConfigError, match="libseccomp"):
        check_bubblewrap()


async def test_the_keys_of_the_machine_are_out_of_reach():
    code = "import ctypes, errno\ncall = ctypes.CDLL(None, use_errno=True)\n"
    for expression in ("call.syscall(248, b'user', b'left', b'x', 1, -3)", "call.syscall(250, 6, -3, None, 0)"):
        code += f"assert {expression} == -1 and ctypes.get_errno() == errno.EPERM\n"
    async with sandbox(SandboxSpec()) as box:
        done = await box.run(["python3", "-c", code])
        assert (done.code, done.errors) == (0, b"")


async def test_a_box_of_a_process_with_many_open_files_gives_its_commands_their_own_only():
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    try:
        async with sandbox(SandboxSpec()) as box:
            await box.stop_processes()
            done = await box.run(["ls", "/proc/self/fd"])
            assert done.output.split() == [b"0", b"1", b"2", b"3"]
    finally:
        for one in held:
            os.close(one)
