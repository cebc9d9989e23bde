"""Boxes of a container engine: images, limits, and what a killed owner leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine import require

from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited
from palestra.sandbox import Sandbox, SandboxLimits, SandboxSpec, sandbox
from palestra_sandboxes.container.engine import PREFIX, ContainerEngine, find_engine, owner
from palestra_sandboxes.container.images import _known, check_dockerfile, image_of
from palestra_sandboxes.container.provider import ContainerBox, _said

pytestmark = pytest.mark.ci

require("podman", "runc", "busybox", "bash-static")
LIMITS = SandboxLimits(cpus=1, memory_mib=64, processes=30, disk_mib=32, seconds=30)


@pytest.fixture
def spec(tiny_image) -> SandboxSpec:
    return SandboxSpec(image=tiny_image, limits=LIMITS)


def podman(*words: str) -> str:
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True).stdout


def boxes(owner: str = owner()) -> list[str]:
    return podman("ps", "-a", "--filter", f"name=^{PREFIX}{owner}", "--format", "{{.Names}}").split()


@pytest.fixture
async def folder(tiny_image, tmp_path) -> Path:
    """A folder with a Dockerfile on top of the tiny image; what is built from it is removed."""
    base = (await image_of(find_engine(), SandboxSpec(image=tiny_image))).reference
    lines = (
        f"FROM {base}",
        f"LABEL palestra.test={tmp_path.name}",
        "RUN echo made > /made",
        "COPY given /app/given",
        "ENV SAID=yes",
    )
    (tmp_path / "Dockerfile").write_text("\n".join((*lines, "WORKDIR /app", "USER agent", "")))
    (tmp_path / "given").write_text("given")
    yield tmp_path
    for engine, reference in list(_known):
        if reference != base:
            subprocess.run([engine, "rmi", "-f", reference], capture_output=True, check=False)
            del _known[engine, reference]
    podman("image", "prune", "-f", "--filter", f"label=palestra.test={tmp_path.name}")  # of a build that failed


async def test_an_image_is_built_once_from_a_dockerfile_and_gives_user_folder_and_variables(folder):
    spec = SandboxSpec(build=folder, limits=LIMITS)
    async with sandbox(spec) as box:
        assert box.workdir == "/app"
        done = await box.run(["sh", "-c", "id -un; pwd; cat given /made; echo $SAID; touch /made"])
        assert done.output == b"agent\n/app\ngivenmade\nyes\n"
        assert done.code != 0
        await box.put({"a/own": b"1"}, "/tmp/box")
        assert (await box.run(["stat", "-c", "%u", "/tmp/box/a/own", "/tmp/box/a"])).output == b"1000\n1000\n"
        assert (await box.run(["id", "-un"], user="root")).output == b"root\n"
    made = podman("images", "-q", (await image_of(find_engine(), spec)).reference)
    _known.clear()
    began = time.monotonic()
    await image_of(find_engine(), spec)
    assert time.monotonic() - began < 1
    assert podman("images", "-q", (await image_of(find_engine(), spec)).reference) == made


async def test_an_image_that_does_not_build_is_said_with_its_last_lines(folder):
    with (folder / "Dockerfile").open("a") as file:
        file.write("USER root\nRUN yes | head -n 300000; echo the reason >&2; exit 7\n")
    with pytest.raises(ConfigError, match="the reason") as raised:
        async with sandbox(SandboxSpec(build=folder)):
            pass
    assert len(str(raised.value)) < 3000


async def test_an_image_that_is_nowhere_is_a_mistake_of_the_configuration(tmp_path):
    (tmp_path / "broken.tar").write_bytes(b"no archive")
    (tmp_path / "empty").mkdir()
    for wrong in (
        SandboxSpec(image=str(tmp_path / "broken.tar")),
        SandboxSpec(image=str(tmp_path / "missing.tar")),
        SandboxSpec(image="localhost/no-such-image:1"),
        SandboxSpec(build=tmp_path / "empty"),
        SandboxSpec(build=tmp_path / "missing"),
    ):
        with pytest.raises(ConfigError):
            async with sandbox(wrong):
                pass


@pytest.mark.slow
async def test_an_archive_of_an_image_is_loaded(tiny_image, tmp_path):
    base = (await image_of(find_engine(), SandboxSpec(image=tiny_image))).reference
    podman("save", "-q", "-o", str(tmp_path / "saved.tar"), base)
    async with sandbox(SandboxSpec(image=str(tmp_path / "saved.tar"), limits=LIMITS)) as box:
        assert (await box.run(["echo", "ran"])).output == b"ran\n"
    (loaded,) = [reference for _, reference in _known if reference != base]
    podman("rmi", loaded)
    _known.clear()


async def test_what_is_of_the_machine_is_neither_seen_nor_reached(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@127.0.0.1:1")
    monkeypatch.setenv("API_KEY", "secret")
    (tmp_path / "secret").write_text("secret")
    async with sandbox(replace(spec, environment={"OWN": "1"})) as box:
        done = await box.run(
            ["sh", "-c", f"env; cat /etc/hosts /etc/hostname; ls {tmp_path}; ls /sys/fs/cgroup/memory"]
        )
        assert b"secret" not in done.output
        assert os.uname().nodename.encode() not in done.output.replace(b"HOSTNAME", b"").splitlines()
        assert b"OWN=1" in done.output
        mapped = (await box.run(["cat", "/proc/self/uid_map"])).output.split()
        assert os.geteuid() != 0 or mapped[:2] == [b"0", b"100000"]  # its root is no one outside
        done = await box.run(["sh", "-c", "busybox mount -t proc none /tmp || busybox mknod /tmp/disk b 8 0"])
        assert done.code != 0
        assert (await box.run(["grep", "-c", "NoNewPrivs:.1", "/proc/self/status"])).output == b"1\n"


async def test_an_open_network_is_that_of_the_engine(spec):
    async with sandbox(replace(spec, network="open")) as box:
        interfaces = (await box.run(["cat", "/proc/net/dev"])).output.decode().splitlines()[2:]
    assert len(interfaces) == 2  # its own, and one that leads out


def socket_program(family: int) -> bytes:
    """Return a program for Linux on x86-64 that opens a socket, and ends with the error's number, or with 253."""
    code = bytes.fromhex("b829000000bf") + family.to_bytes(4, "little")
    code += bytes.fromhex("be0100000031d20f05f7d889c7b83c0000000f05")
    begin, at = 0x400000, 120
    kind = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = kind + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, begin + at, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, begin, begin, at + len(code), at + len(code), 4096) + code


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the program is for x86-64")
async def test_sockets_that_know_no_namespaces_are_refused(spec):
    """Those between a virtual machine and its host (AF_VSOCK, 40)."""
    async with sandbox(spec) as box:
        await box.put({str(family): socket_program(family) for family in (1, 2, 10, 40, 38)}, "/tmp/open")
        found = [(await box.run([f"/tmp/open/{family}"])).code for family in (1, 2, 10, 40, 38)]
    assert found[:3] == [253] * 3
    assert set(found[3:]) <= {errno.EPERM, errno.ENOSYS}


async def test_processors_and_processes_are_limited_together(spec):
    async with sandbox(spec) as box:
        assert podman("inspect", "--format", "{{.HostConfig.NanoCpus}}", box.name) == "1000000000\n"
        done = await box.run(["bash", "-c", "for i in {1..60}; do sleep 50 & done 2>&1; jobs | wc -l"], seconds=3)
        assert done.timed_out or int(done.output.split()[-1]) < LIMITS.processes
        inside = "ls -d /proc/[0-9]* | wc -l"
        await box.stop_processes()
        assert int((await box.run(["sh", "-c", inside])).output) < 8


@pytest.mark.parametrize(
    "fill",
    [
        "for i in 1 2 3 4; do dd if=/dev/zero of=/tmp/x$i bs=1M count=20; done; sleep 20",
        'for i in 3 4 5 6; do eval "exec $i> /tmp/x; rm /tmp/x; dd if=/dev/zero bs=1M count=20 >&$i"; done; sleep 20',
    ],
    ids=["files", "files without a name"],
)
async def test_a_box_that_fills_the_disk_is_ended_and_it_is_the_agents_doing(spec, fill):
    async with sandbox(spec) as box:
        done = await box.run(["sh", "-c", "dd if=/dev/zero of=/tmp/large bs=1M count=100; rm /tmp/large"])
        assert b"100+0 records out" not in done.errors  # one file is limited by the kernel
        with pytest.raises(EpisodeForfeited, match="32 MiB"):
            await box.run(["bash", "-c", fill])
        with pytest.raises(EpisodeForfeited):
            await box.run(["true"])


@pytest.mark.parametrize("applet", [None, "true", pytest.param("sleep 9", marks=pytest.mark.slow)])
async def test_a_box_that_was_broken_from_inside_is_the_agents_doing(spec, applet):
    made = "" if applet is None else f"printf '#!/bin/busybox {applet}\\n' > /bin/sh; chmod 755 /bin/sh"

    async def end_processes(box: Sandbox) -> None:
        await box.stop_processes()
        await box.run(["true"])

    async with sandbox(spec) as box:
        await box.run(["sh", "-c", f"rm /bin/sh; {made}"])
        for _ in range(2):
            with pytest.raises(EpisodeForfeited):
                await end_processes(box)


async def test_a_box_that_was_removed_from_outside_is_a_failure(spec):
    async with sandbox(spec) as box:
        for _ in range(10):  # podman gives up where a mount of the box is still busy
            if not subprocess.run(["podman", "rm", "-f", "-t", "0", box.name], capture_output=True).returncode:
                break
        assert box.name not in boxes()
        with pytest.raises(EnvironmentFailed):
            await box.run(["true"])
        with pytest.raises(EnvironmentFailed):
            await box.get("/tmp", 10)


async def test_a_folder_without_files_and_no_files_at_all_are_copied(spec, tmp_path):
    async with sandbox(replace(spec, folder=tmp_path, workdir="/own")) as box:
        await box.put({}, "/own")
        assert await box.get("/own", 1000) == {}
        assert (await box.run(["pwd"])).output == b"/own\n"


async def test_a_box_that_is_removed_while_it_starts_is_a_failure(spec, monkeypatch):
    """Between two looks at it: the folder of what it writes is gone with it."""
    find = ContainerBox._state

    async def removed(self):
        state = await find(self)
        subprocess.run(["podman", "rm", "-f", "-t", "0", self.name], capture_output=True, check=False)
        return state

    monkeypatch.setattr(ContainerBox, "_state", removed)
    with pytest.raises(EnvironmentFailed, match="removed from outside"):
        async with sandbox(spec):
            pass
    assert not boxes()


async def test_ten_boxes_at_once(spec):
    async def play(number: int) -> bytes:
        async with sandbox(spec) as box:
            await box.put({"number": str(number).encode()}, "/tmp/own")
            return (await box.run(["cat", "/tmp/own/number"])).output

    assert await asyncio.gather(*map(play, range(10))) == [str(number).encode() for number in range(10)]
    assert not boxes()


OWNER = """
import asyncio, sys
from palestra.sandbox import SandboxLimits, SandboxSpec, sandbox
async def main():
    async with sandbox(SandboxSpec(image=sys.argv[1], limits=SandboxLimits(processes=30, memory_mib=64))) as box:
        print("open", flush=True)
        await box.run(["sleep", "4324"], seconds=100)
asyncio.run(main())
"""


def killed_owner(image: str) -> int:
    """Kill a process that has a box, and return its number."""
    with subprocess.Popen([sys.executable, "-c", OWNER, image], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        assert boxes(f"{owner.pid}-")
        owner.kill()
        return owner.pid


def test_a_box_ends_with_the_process_that_made_it(tiny_image):
    process = killed_owner(tiny_image)
    until = time.monotonic() + 20
    while (left := boxes(f"{process}-")) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left


async def test_the_next_process_removes_what_a_killed_one_left(spec, monkeypatch):
    """Its own watcher was killed, too."""
    name = f"{PREFIX}999999999-1-{os.stat('/proc/self/ns/pid').st_ino}-abc"
    foreign = f"{PREFIX}999999999-1-1-abc"  # of a process elsewhere, which may live
    image = (await image_of(find_engine(), spec)).reference
    for one in (name, foreign):
        await find_engine().ask(
            "run", "-d", "--name", one, "--network", "none", *find_engine().limits, image, "sleep", "100"
        )
    try:
        assert {name, foreign} == set(boxes("999999999-"))
        await ContainerEngine(find_engine().program).remove_orphans()
        assert boxes("999999999-") == [foreign]
    finally:
        podman("rm", "-f", "-t", "0", foreign)


def test_a_machine_without_an_engine_is_told_what_to_install(monkeypatch, tmp_path):
    find_engine.cache_clear()
    try:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="install podman"):
            find_engine()
        (tmp_path / "docker").write_text(f"#!{sys.executable}\nraise SystemExit(1)")
        (tmp_path / "docker").chmod(0o755)
        with pytest.raises(ConfigError, match="daemon"):
            find_engine()
    finally:
        find_engine.cache_clear()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("RUN --mount=type=bind,source=link,target=/h cat /h/shadow", "--mount"),
        ("RUN --mount=type=cache,id=../../../../etc,target=/h cat /h/shadow", "--mount"),
        ("onbuild RUN --mo\\\n# between\nunt=type=cache,id=../..,target=/h true", "--mount"),
        ('RUN --m"oun"t=type=cache,id=../..,target=/h true', "--mount"),
        ("ADD http://127.0.0.1:80/ /page", "ADD"),
        ("ARG X=http://127.0.0.1/\nADD \\\n  $X /page", "ADD"),
        ("FROM --platform=linux/amd64 dir:/etc", "path"),
        ("COPY --from=oci-archive:/root/x.tar / /", "path"),
    ],
)
async def test_a_dockerfile_that_reads_the_machine_is_not_built(tmp_path, line, why):
    (tmp_path / "Dockerfile").write_text(f"FROM scratch\n{line}\n")
    with pytest.raises(ConfigError, match=f"is not built.*{why}"):
        async with sandbox(SandboxSpec(build=tmp_path, limits=LIMITS)):
            pass


def test_a_dockerfile_may_copy_add_and_name_images(tmp_path):
    lines = (
        "FROM python:3.12 AS dir",
        "COPY --from=dir /a /b",
        "ADD x.tar.gz /x",
        "RUN add http://x; mount --bind a b",
    )
    (tmp_path / "Dockerfile").write_text("\n".join((*lines, "RUN curl https://x > y", "")))
    check_dockerfile(tmp_path)


@pytest.mark.parametrize("image", ["dir:/etc", "docker-archive:x", "--privileged", ""])
def test_an_image_is_no_path_by_another_name_and_no_option(image):
    with pytest.raises(ConfigError, match="no name of an image"):
        SandboxSpec(image=image).check()


def test_a_shell_that_says_an_endless_number_has_said_none():
    output = SimpleNamespace(streams=(b"", b"1" * 5000 + b"\nbad"))
    assert _said(output)[0] is None


async def test_the_engine_leaves_no_copy_of_what_goes_in(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with sandbox(spec) as box:
        await box.put({"file": b"content"}, "/tmp")
        assert (await box.run(["cat"], input=b"x")).output == b"x"
    assert list(tmp_path.glob("*")) == []


@pytest.mark.slow
def test_a_build_ends_with_the_process_that_started_it(tiny_image, folder):
    (folder / "Dockerfile").write_text(
        (folder / "Dockerfile").read_text().replace("RUN echo made", "RUN trap '' TERM; sleep 43217")
    )
    code = "import asyncio, sys; from pathlib import Path; from palestra.sandbox import *\n"
    code += "async def main():\n    async with sandbox(SandboxSpec(build=Path(sys.argv[1]))): pass\nasyncio.run(main())"
    worker = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    until = time.monotonic() + 120
    for expected in (True, False):
        while (
            not subprocess.run(["pgrep", "-f", "sleep 43217$"], capture_output=True, check=False).returncode
        ) != expected:
            assert time.monotonic() < until
            time.sleep(0.1)
        worker.kill()
    worker.wait()
