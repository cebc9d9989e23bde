"""Where the servers of an engine meet the trainer, so that it can broadcast weights to them."""

from __future__ import annotations

import ipaddress
import secrets
import socket

import torch
import torch.distributed as dist

from palestra.errors import ConfigError
from palestra_engines.vllm.worker.palestra_weight_group import DEVICES, WeightGroup, open_store, reach_store

LOOPBACK = "127.0.0.1"


class Rendezvous:
    """A store of this process through which the ranks of every group find each other.

    The store has no key. Its entries are encrypted under the name of their group (`SealedStore`), which servers get
    over their own, authenticated connections; so a program that reaches the store can at most disturb a rendezvous.

    Attributes:
        host: address at which the store listens.
        seconds: timeout of a rendezvous, or of one broadcast.
    """

    def __init__(self, address: str | None, backend: str, seconds: float) -> None:
        """Listen. `address` is this machine's, for the servers, optionally with a port; None: all servers are on this
        machine.
        """
        self.backend, self.seconds = backend, seconds
        if DEVICES[backend] == "cuda" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigError(
                "engine.weight_transfer = 'nccl' needs a GPU in the job's process, and there is none; take 'gloo'"
            )
        name, _, port = (address or LOOPBACK).partition(":")
        try:
            if ipaddress.ip_address(socket.gethostbyname(name)).is_unspecified:
                raise ConfigError(
                    f"engine.weights_address is {address!r}, which would listen on all networks of this machine; name "
                    "one address of it"
                )
            listening = socket.create_server((name, int(port or 0)))
            self.host, self.port = listening.getsockname()[:2]
            # A store that makes its own socket would listen at all addresses of the machine.
            self._store = open_store(self.host, self.port, seconds, listening.detach())
        except (OSError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"nothing can listen at {address or LOOPBACK} for servers that get weights: {_reason(error)}; give an "
                "address of this machine as engine.weights_address, and a free port or none"
            ) from error

    def new_name(self) -> str:
        """Return a new group name that cannot be guessed."""
        return secrets.token_urlsafe(24)

    def meet(self, name: str, size: int) -> WeightGroup:
        """Return a group in which this process is rank 0; blocks until the other ranks have joined."""
        # A connection of its own: on one that groups share, a meeting to which no rank comes would delay the next.
        store = reach_store(self.host, self.port, self.seconds)
        return WeightGroup(store, name, self.backend, 0, size, self.host, self.seconds)


def _reason(error: Exception) -> str:
    """Return why it cannot listen, without the address, which Python repeats."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return said.partition(" (while")[0]
