"""The keys of a server with tenants: one a tenant, in a file that only the server's owner reads."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from palestra.disk import private_folder, read_own, write_whole, writing
from palestra.errors import ConfigError, Unauthorized

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_LEAST = 20  # characters of a key


class Tenants:
    """The tenants of a server, by their keys."""

    def __init__(self, folder: Path, names: Sequence[str], prefix: str) -> None:
        """Read the keys in a folder, after writing one for each name that has none."""
        with writing(folder):
            private_folder(folder)
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise ConfigError(f"a tenant's name has up to 64 of a-z, 0-9, - and _, and can't be {name!r}")
            if not (folder / name).exists():
                write_whole(folder / name, (prefix + secrets.token_hex(24)).encode(), 0o600)
        # Looked up by digest, so that the time of a comparison says nothing about a key.
        self._by_digest: dict[str, str] = {}
        self._secrets: dict[str, bytes] = {}
        for path in sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)):
            key = read_own(path).decode("utf-8-sig", errors="replace").strip()
            if not key.startswith(prefix) or len(key) < _LEAST:
                raise ConfigError(f"{path} holds no key: those of this server begin with {prefix}, and are long")
            if self._by_digest.setdefault(_digest(key), path.name) != path.name:
                raise ConfigError(f"{path} has the key of another tenant")
            self._secrets[path.name] = hashlib.sha256(b"links of " + key.encode()).digest()
        self._folder = folder

    @property
    def files(self) -> list[Path]:
        """Return the files with the keys."""
        return [self._folder / name for name in sorted(self._by_digest.values())]

    def secret(self, tenant: str) -> bytes:
        """Return what signs in a tenant's name; it is another one when the key is."""
        if tenant not in self._secrets:
            raise Unauthorized("this server has no such tenant")
        return self._secrets[tenant]

    def of(self, key: str | None) -> str:
        """Return the tenant of a key."""
        tenant = None if key is None else self._by_digest.get(_digest(key))
        if tenant is None:
            raise Unauthorized("the key is missing, or is no key of this server")
        return tenant


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
