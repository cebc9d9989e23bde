"""TOML files that users write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file in UTF-8; a byte order mark is skipped."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
