"""A resources server that ships with NeMo Gym, as it is served. Arguments: its package, its class, the port."""

from __future__ import annotations

import sys
from importlib import import_module
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient


def main(package: str, name: str, port: int) -> None:
    module = import_module(f"resources_servers.{package}.app")
    config = getattr(module, f"{name}Config")(host="127.0.0.1", port=port, entrypoint="", name="partner")
    # No other server of NeMo Gym takes part: the server under test has nobody to call.
    server = getattr(module, name)(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
