"""A server of base models ends at a signal while it is loading them, which may take minutes."""

from __future__ import annotations

import signal
import sys

import pytest
from servers import Process, until

pytestmark = pytest.mark.slow
SECONDS = 10.0  # from the signal to the end
LOADING_FOR_EVER = """
import sys, time
import palestra_bases.models
from palestra.cli.main import main

def load(options):
    print("loading", flush=True)
    time.sleep(3600)

palestra_bases.models.SharedModels = load
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["tinker", "base"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_a_server_that_is_loading(tmp_path, command, number, code):
    words = [sys.executable, "-c", LOADING_FOR_EVER, command, "tiny-random", "--dir", tmp_path / "server"]
    server = Process.start(words, tmp_path / "server.log")
    try:
        until(lambda: "loading" in server.output or server.popen.poll() is not None, "the server loads its model")
        server.send(number)
        assert server.wait(SECONDS) == code, server.output
    finally:
        server.kill()
