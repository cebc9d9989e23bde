"""A file with the results of finished runs, so that a comparison can continue where the runs' folders are not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from palestra import __version__
from palestra.config import JobConfig
from palestra.disk import write_whole
from palestra.errors import ConfigError, StoreError
from palestra_lab.comparison.execution import first_difference
from palestra_lab.comparison.one_run import AGAIN, cause_of
from palestra_lab.comparison.plan import PlannedRun, settings_of
from palestra_lab.comparison.results import SECONDS, TOKENS, TOTAL, Row, machine, reward_name
from palestra_lab.config import Table

FORMAT = 1


class KeptResults:
    """The results of finished runs in one JSON file, which may be in a repository and be continued by others.

    The file has each run's settings and the page's data: tokens, seconds and rewards at each validation. Runs whose
    settings differ from the file's are refused, because the page would compare the two. Paths below the folder of
    compare.toml are stored as relative.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder.resolve()
        self._runs: dict[str, dict[str, Any]] = _read(path)

    def rows(self, run: PlannedRun) -> Sequence[Row] | None:
        """Return the rows of a finished run for `result_of`; None: the file does not have the run."""
        found = self._run(run)
        if found is None:
            return None
        self._check(run)
        rows: Sequence[Row] = found["rows"]
        return rows

    def machine(self, run: PlannedRun) -> str:
        """Return the machine of a stored run."""
        return str((self._run(run) or {}).get("machine", "unknown machine"))

    def _run(self, run: PlannedRun) -> dict[str, Any] | None:
        """Return the data of a stored run, or None."""
        found: dict[str, Any] | None = self._runs.get(_key(run), {}).get("seeds", {}).get(str(run.seed))
        return found

    def add(self, run: PlannedRun, rows: Sequence[Row]) -> None:
        """Add the result of a finished run; `write` stores it."""
        self._check(run)
        entry = self._runs.setdefault(_key(run), {"settings": self._settings(run), "seeds": {}})
        entry["seeds"][str(run.seed)] = {
            "palestra": __version__,
            "machine": machine(),
            "rows": _reduced(rows, run.policies),
        }

    def write(self) -> None:
        """Write the file atomically."""
        # One line a run: a later run adds a line, and a difference between two files can be read.
        text = [f'{{"format": {FORMAT}, "runs": {{']
        for number, (key, entry) in enumerate(sorted(self._runs.items())):
            seeds = sorted(entry["seeds"].items(), key=lambda item: int(item[0]))
            lines = [f"  {json.dumps(seed)}: {json.dumps(found)}" for seed, found in seeds]
            text.append(f'{"," if number else ""}{json.dumps(key)}: {{"settings": {json.dumps(entry["settings"])},')
            text.append(' "seeds": {\n' + ",\n".join(lines) + "}}")
        text.append("}}\n")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, "\n".join(text).encode())
        except (OSError, StoreError) as error:
            raise ConfigError(f"{self._path} could not be written: {cause_of(error)}; {AGAIN}") from error

    def _check(self, run: PlannedRun) -> None:
        """Raise an error for a run whose settings differ from the file's."""
        entry = self._runs.get(_key(run))
        if entry is None:
            return
        known = dict(entry["settings"])
        with contextlib.suppress(ValidationError):
            # Keys that this version has and the version of the file had not get their defaults, as a resumed run's do.
            known["config"] = _without_seed(settings_of(JobConfig.model_validate(known["config"])))
        key = first_difference(known, self._settings(run))
        if key is not None:
            raise ConfigError(
                f"{self._path} has runs of {_key(run)} with another {key}; name another file, or remove that entry to "
                "run them again"
            )

    def _settings(self, run: PlannedRun) -> dict[str, Any]:
        """Return the settings of a run without its seed, as JSON that is the same on every machine."""
        settings = run.settings | {"config": _without_seed(run.settings["config"])}
        return dict(_relative(json.loads(json.dumps(settings)), f"{self._folder}/"))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of a file by scenario and algorithm; empty without a file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {cause_of(error)}") from error
    except ValueError:
        found = None
    if not isinstance(found, dict) or not _has_runs(found.get("runs")):
        raise ConfigError(f"{path} has no results of a comparison; name another file")
    if found.get("format") != FORMAT:
        raise ConfigError(f"{path} was written by another version of Palestra (format {found.get('format')!r})")
    runs: dict[str, dict[str, Any]] = found["runs"]
    return runs


def _has_runs(runs: Any) -> bool:
    """Return whether a value has the form of the runs of a file."""
    return isinstance(runs, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("settings"), dict)
        and isinstance(entry.get("seeds"), dict)
        and all(isinstance(one, dict) and isinstance(one.get("rows"), list) for one in entry["seeds"].values())
        for entry in runs.values()
    )


def _without_seed(config: Table) -> Table:
    """Return the settings of a job that the runs of an algorithm have in common."""
    return {key: value for key, value in config.items() if key != "seed"}


def _key(run: PlannedRun) -> str:
    """Return the key of a scenario's and algorithm's runs."""
    return f"{run.scenario}/{run.algorithm}"


def _reduced(rows: Sequence[Row], policies: Sequence[str]) -> list[Row]:
    """Return a row for each validation and one for the end, with the same `result_of`."""
    kept = (TOKENS, TOTAL, *map(reward_name, policies))
    found, seconds = list[Row](), 0.0
    for number, row in enumerate(rows, 1):
        seconds += row.get(SECONDS, 0.0)
        if TOTAL in row or number == len(rows):
            found.append({name: row[name] for name in kept if name in row} | {SECONDS: round(seconds, 3)})
            seconds = 0.0
    return found


def _relative(value: Any, folder: str) -> Any:
    """Return JSON with texts relative to a folder."""
    if isinstance(value, dict):
        return {key: _relative(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_relative(inner, folder) for inner in value]
    return value.removeprefix(folder) if isinstance(value, str) else value
