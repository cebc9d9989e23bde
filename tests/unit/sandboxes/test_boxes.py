"""What every box has to do, of bubblewrap and of a container engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from machine import require

from palestra.errors import ConfigError, EnvironmentFailed, InvalidRequest, PayloadTooLarge
from palestra.sandbox import Finished, Sandbox, SandboxLimits, SandboxSpec, sandbox
from palestra_sandboxes.bubblewrap.provider import BubblewrapProvider

pytestmark = pytest.mark.ci

require("bwrap", "git")
LIMITS = SandboxLimits(memory_mib=128, processes=40, disk_mib=64, seconds=30, output_bytes=100_000)

LISTED = "for one in /proc/[0-9]*; do cat $one/cmdline; echo; done"  # of all processes


@pytest.fixture(params=["bubblewrap", "container"])
def spec(request) -> SandboxSpec:
    image = request.getfixturevalue("tiny_image") if request.param == "container" else None
    return SandboxSpec(image=image, limits=LIMITS, workdir="/tmp/work")


@pytest.fixture
async def box(spec) -> AsyncIterator[Sandbox]:
    async with sandbox(spec) as opened:
        yield opened


async def sh(box: Sandbox, command: str, **settings) -> Finished:
    return await box.run(["bash", "-c", command], **settings)


async def test_commands_get_input_variables_and_folder_and_give_both_outputs_and_a_code(box):
    command = 'pwd; cat; printf %s "$X"; echo bad >&2; exit 3'
    done = await sh(box, command, input=bytes(range(256)), environment={"X": "a b\n'c'"})
    assert done == Finished(code=3, output=b"/tmp/work\n" + bytes(range(256)) + b"a b\n'c'", errors=b"bad\n")
    unread = await sh(box, "echo out; echo bad >&2; exit 3", input=b"x" * 1_000_000)
    assert unread == Finished(code=3, output=b"out\n", errors=b"bad\n")
    assert (await box.run(["pwd"], folder="/tmp")).output == b"/tmp\n"
    assert (await box.run(["no-such-program"])).code == 127
    assert (await box.run(["true"], folder="/no/such/folder")).code in (126, 127)


async def test_files_go_in_executable_and_come_out_without_links(box):
    files = {"a/b": b"#!/bin/sh\necho ran", "ümlaut": b"", "binary": bytes(range(256))}
    await box.put(files, "/tmp/new/folder")
    assert (await box.run(["/tmp/new/folder/a/b"])).output == b"ran\n"
    await sh(
        box, "cd /tmp/new/folder; ln -s /etc/passwd link; ln -s / root; mkdir empty; mkfifo pipe 2>/dev/null; true"
    )
    assert await box.get("/tmp/new/folder", 1000) == files
    assert await box.get("/tmp/nowhere", 1000) == {}
    assert await box.get("/tmp/new/folder/a/b", 1000) == {}  # no folder
    await sh(box, "ln /tmp/new/folder/a/b /tmp/new/folder/c")
    assert await box.get("/tmp/new/folder/", 1000) == files | {"c": files["a/b"]}
    with pytest.raises(PayloadTooLarge):  # each name counts
        await box.get("/tmp/new/folder", sum(map(len, files.values())) + 5)
    assert (await sh(box, "stat -c %a /tmp")).output.strip() in (b"755", b"1777")  # as it was
    with pytest.raises(InvalidRequest):
        await box.put({"../out": b""}, "/tmp/new")
    with pytest.raises(PayloadTooLarge):
        await box.get("/tmp/new/folder", 100)


async def test_a_folder_that_is_too_large_is_not_read_into_memory(box):
    await sh(box, "mkdir /tmp/holes; for i in 1 2 3; do dd if=/dev/zero of=/tmp/holes/$i bs=1 count=1 seek=20M; done")
    with pytest.raises(PayloadTooLarge):
        await box.get("/tmp/holes", 1000)


async def test_time_and_output_of_a_command_are_limited(box):
    began = time.monotonic()
    done = await sh(box, "echo begun; sleep 60", seconds=0.7)
    assert (done.code, done.output, done.timed_out, done.cut) == (137, b"begun\n", True, False)
    done = await box.run(["yes"])
    assert (done.code, len(done.output), done.timed_out, done.cut) == (137, LIMITS.output_bytes, False, True)
    assert (await sh(box, "yes >&2")).cut
    assert time.monotonic() - began < 15
    assert b"sleep" not in (await sh(box, LISTED)).output.replace(b"sleep\x003600", b"").replace(b"sleep 3600", b"")


async def test_memory_is_limited_and_the_box_goes_on(box):
    done = await sh(box, "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}")
    assert b"300000000" not in done.output
    assert (await box.run(["echo", "on"])).output == b"on\n"


async def test_processes_of_bubblewrap_that_are_over_the_memory_together_end_and_the_box_goes_on():
    each = "python3 -c 'import time; x = bytearray(60 << 20); time.sleep(20)' & "
    async with sandbox(SandboxSpec(limits=LIMITS)) as box:
        assert b"more than 128 MiB of memory" in (await sh(box, each * 4 + "wait")).errors
        assert await box.run(["echo", "on"]) == Finished(code=0, output=b"on\n", errors=b"")


async def test_a_fork_bomb_and_what_leaves_its_session_end_before_scoring(box):
    await sh(box, "echo kept > file; setsid sleep 4321 > /dev/null 2>&1 & sleep 0.3")
    assert b"4321" in (await sh(box, LISTED)).output
    done = await sh(box, "bomb() { bomb | bomb & }; bomb; sleep 60", seconds=1)
    assert done.timed_out
    await box.stop_processes()
    found = (await sh(box, LISTED)).output
    assert b"4321" not in found
    assert b"bomb" not in found
    assert await box.get("/tmp/work", 100) == {"file": b"kept\n"}


async def test_there_is_no_network(box):
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        done = await sh(box, f"exec 3<> /dev/tcp/127.0.0.1/{port} && echo connected")
        assert b"connected" not in done.output
        assert b"refused" in done.errors
        (await asyncio.open_connection("127.0.0.1", port))[1].close()  # the test can fail
    interfaces = (await sh(box, "cat /proc/net/dev")).output.decode()
    assert [line.split(":")[0].strip() for line in interfaces.splitlines() if ":" in line] == ["lo"]


async def test_the_model_server_and_nothing_else_is_reached(spec):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as server,
        await asyncio.start_server(answer, "127.0.0.1", 0) as other,
    ):
        port, closed = (one.sockets[0].getsockname()[1] for one in (server, other))
        url = f"http://127.0.0.1:{port}/v1"
        asking = "exec 3<> /dev/tcp/127.0.0.1/{} && echo hello >&3 && cat <&3"
        async with sandbox(replace(spec, network="endpoint", endpoint=url)) as box:
            assert box.endpoint == url
            for _ in range(2):
                assert (await sh(box, asking.format(port))).output == b"HELLO\n"
                assert b"refused" in (await sh(box, asking.format(closed))).errors
                await box.stop_processes()


async def test_its_folder_is_copied_with_links_and_modes(spec, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("content")
    (tmp_path / "script").write_text("#!/bin/sh\necho ran")
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/shadow")
    async with sandbox(replace(spec, folder=tmp_path)) as box:
        assert (await box.run(["./script"])).output == b"ran\n"
        done = await sh(box, "cat deep/file; echo more > deep/file; cat link")
        assert done.output == b"content"
        assert b"link" in done.errors
    assert (tmp_path / "deep" / "file").read_text() == "content"


async def test_a_cancelled_command_ends(box):
    task = asyncio.ensure_future(sh(box, "sleep 4322"))
    await asyncio.sleep(0.7)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert b"4322" not in (await sh(box, LISTED)).output


async def test_nothing_is_left(spec):
    async with sandbox(spec):  # what is kept for all boxes
        pass
    before = psutil.Process().num_fds()
    others = {one.pid for one in psutil.Process().children()}
    for _ in range(2):
        async with sandbox(spec) as box:
            await sh(box, "sleep 4323 & echo x > file")
    assert psutil.Process().num_fds() == before
    assert {one.pid for one in psutil.Process().children()} <= others
    assert not [one for one in psutil.process_iter(["cmdline"]) if "4323" in (one.info["cmdline"] or ())]


async def test_a_box_that_was_ended_from_outside_is_a_failure(spec):
    if spec.image is not None:
        pytest.skip("the next file has it for containers")
    async with sandbox(spec) as box:
        os.kill(box._program.process.pid, 9)
        with pytest.raises(EnvironmentFailed):
            await box.run(["true"])


async def test_a_box_that_is_gone_when_a_command_is_to_be_ended_is_a_failure():
    async with sandbox(SandboxSpec(limits=LIMITS), BubblewrapProvider()) as box:
        running = asyncio.ensure_future(box.run(["sleep", "60"], seconds=0.3))
        await asyncio.sleep(0.1)
        asyncio.get_running_loop().remove_reader(box._control)  # its end is not seen yet
        os.kill(box._program.process.pid, 9)
        with pytest.raises(EnvironmentFailed):
            await running


@pytest.mark.parametrize(
    "wrong",
    [
        {"image": "a", "build": "."},
        {"network": "endpoint"},
        {"endpoint": "http://127.0.0.1:1"},
        {"network": "endpoint", "endpoint": "https://x"},
        {"workdir": "relative"},
        {"folder": "/no/such/folder"},
        {"image": "--privileged"},
        {"user": "root"},
        {"network": "open"},
        {"workdir": "/usr/x"},
        {"workdir": f"/work/{'x' * 300}"},
        {"limits": SandboxLimits(cpus=1)},
        {"limits": SandboxLimits(disk_mib=None)},
        {"limits": SandboxLimits(seconds=float("nan"))},
    ],
)
async def test_what_can_not_be_kept_is_refused(wrong, tmp_path):
    paths = {name: Path(value) for name, value in wrong.items() if name in ("build", "folder")}
    with pytest.raises(ConfigError):
        async with sandbox(SandboxSpec(**(wrong | paths))):
            pass


async def test_an_unknown_provider_is_named():
    with pytest.raises(ConfigError, match="bubblewrap"):
        async with sandbox(SandboxSpec(), "bublewrap"):
            pass
