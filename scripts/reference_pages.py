"""Write the reference pages of docs/ from the code (`make docs`); a test checks that they are current."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from python_reference import python_page

from palestra.config import JobConfig
from palestra.config.section import Section, chosen_kind, sections_of
from palestra.doctor.examination import RULES
from palestra.doctor.rule import KEPT, RECENT
from palestra.learner.metrics import metric_tables
from palestra.terminal import say
from palestra.types.metrics import METRICS, OF_THE_JOB
from palestra_service.jobs.rules import CAPS

_HEADER = "<!-- made by `make docs` from the code; do not edit -->\n\n"


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "`metrics.jsonl` has one row a step; a row has the columns that apply to it. Row 0 is the evaluation before "
        "the first step. The same names are in `GET /metrics`, `GET /events` and `TrainResult.metrics`.",
        "",
        "What is measured with a gradient is of the last one of a step: with `algorithm.minibatches` above 1, over the "
        "trained tokens of the last minibatch, and with `algorithm.replay`, over those of the last draw, whose tokens "
        "may be of earlier steps, and of replies that were not sampled. What is of the first update is over the first "
        "minibatch of the first draw.",
        "",
        "Where a job trains several policies, each metric of a policy has its name in front: "
        "`white/train/reward_mean`, `white/validation/reward_mean`, `white/rollout/staleness_max`, `white/version`. In "
        "a step in which a policy is not updated it has only what is said of its episodes (rewards, "
        "`rollout/truncated_share`, `rollout/drift_share`, `rollout/forks_…`) and its `version`. Without a name are "
        "`version`, the "
        "newest of all, `time/train_seconds`, the sum, and what is of the whole job: "
        + ", ".join(f"`{m.name}`" for m in METRICS if m.name in OF_THE_JOB)
        + ".",
    ]
    for title, metrics in metric_tables().items():
        lines += ["", f"## {title}", "", "| name | unit | formula |", "|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {m.formula.replace('|', chr(92) + '|')} |" for m in metrics]
    return _HEADER + "\n".join(lines) + "\n"


def doctor_page() -> str:
    """docs/reference/doctor.md."""
    lines = [
        "# What goes wrong in a run",
        "",
        "`palestra doctor RUN` looks at every step of a run, finished or running, and says what it finds: what was "
        "seen, since which step, what it usually means, what to try, and the episodes that show it. It reads the run's "
        "folder and changes nothing.",
        "",
        "```bash",
        "palestra doctor runs/addition",
        "palestra doctor runs/addition --json     # one object: step, steps, findings, damaged, failed, reason",
        "```",
        "",
        "Exit code: 0 nothing was found; 1 something was found, even if it is over now, or the job or all of its "
        "episodes failed before the first step (`reason` says why, `failed` is the number of episodes); 2 an error.",
        "",
        "A running job looks for the same signs after each step, except for the last three of the table, which need "
        "more than its metrics. What appears is a `warning` on the console, among the events and on the "
        "[page](../how-to/dashboard.md); `/status` has in `warnings` what holds now, and `train/warnings` counts them.",
        "",
        "## Signs",
        "",
        f"`now` is a mean of the last {RECENT} steps, `first` of the run's first {RECENT}; a job of fewer steps is "
        f"judged by all for `equal_rewards`, `truncated`, `context_full`, `opponents_paid_alike` and `workers_fail`. "
        f"Trends are looked for in the newest {KEPT} rows. Metrics are those of "
        "[metrics.md](metrics.md).",
        "",
        "| code | the sign is there if | it usually means | try |",
        "|---|---|---|---|",
        *(f"| `{r.code}` | {r.formula} | {r.means} | {r.remedy} |" for r in RULES),
    ]
    return _HEADER + "\n".join(lines) + "\n"


def configuration_page() -> str:
    """docs/reference/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "A job is a TOML file; every key is optional. An unknown key is refused, with the nearest known name. "
        "`palestra run job.toml --set key=value` changes one key, and `--set key=none` takes it out, so that its "
        "default holds.",
        "",
        "Relative paths in a file are relative to the file: `tasks`, `run_dir`, `weights_dir`, `python`, and `model`, "
        "`reference` and `from_run` where they begin with `./` or `../` or such a folder is there. "
        "Those of `--set` and of scripts are relative to the present folder.",
    ]
    _section(JobConfig, "", lines)
    lines += [
        "",
        "## Keys that may change when a run is resumed",
        "",
        "A run is resumed with the configuration that it was started with. Only these keys may have other values then; "
        "a refusal names the key that differs, with both values.",
        "",
        *(f"- {line}" for line in _free_keys()),
        "",
        "## Caps of a service",
        "",
        "`palestra serve` refuses a job with a larger number than these; its operator may "
        "[change each of them](../how-to/operations.md). `palestra run` and `palestra train` have no caps but the "
        "bounds of the keys themselves.",
        "",
        "| key | at most |",
        "|---|---|",
        *(f"| `{key}` | {cap:,} |" for key, cap in CAPS.items()),
    ]
    return _HEADER + "\n".join(lines) + "\n"


def _free_keys() -> list[str]:
    """Return the keys of a job that decide nothing of what is trained, as lines."""
    config = JobConfig(roles={"agent": "policy"})
    fixed, top, lines = config.what_is_trained(), [], []
    for name, value in config.model_dump(mode="json").items():
        if not isinstance(value, dict):
            # A run that trained can't be resumed to serve its model, or the other way round.
            top += [] if name in fixed or name == "kind" else [f"`{name}`"]
        elif name not in fixed:
            lines.append(f"all of `[{name}]`")
        elif name not in ("policies", "roles") and (free := [key for key in value if key not in fixed[name]]):
            lines.append(f"in `[{name}]`: " + ", ".join(f"`{key}`" for key in free))
    return [", ".join(top) + " (`steps` only while `optimizer.schedule` is `constant`)", *lines]


def api_page(document: Mapping[str, Any]) -> str:
    """docs/reference/api.md, from the data plane's OpenAPI document."""
    schemas = document["components"]["schemas"]
    lines = [
        "# HTTP API of the data plane",
        "",
        "Every request carries `Authorization: Bearer KEY`. The job's key (`RUN/api_key`) opens the job; a claim gives "
        'a key that opens one episode, under one lease. Where the job serves a model (`kind = "inference"`), its key '
        "opens `/v1/…`, and the routes for episodes answer 409. The viewer's key opens the page, `/dashboard/…`, and "
        "[nothing else](../how-to/dashboard.md#who-may-look). The key of a talk, which the page gets for the job's "
        "key, opens `/v1/…` outside of episodes, and nothing else. The server has the machine-readable form at "
        "`/openapi.json`.",
        "",
        'Errors have OpenAI\'s shape, `{"error": {message, type, code, param}}`: 400 not supported or too long, '
        "401 unknown key, 403 a key for something else, 404 no such episode or model, 409 not possible now (the lease "
        "was lost, the episode has ended), 413 body too large, 422 not valid, 429 too many calls (with `Retry-After`), "
        "503 try again. The header `x-should-retry` says whether trying again makes sense.",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines += ["", f"## `{method.upper()} {path}`", "", route.get("description", "").strip()]
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                lines += ["", *_fields(body, schemas)]
            for parameter in route.get("parameters", ()):
                if parameter["in"] != "path":
                    lines += ["", f"Query `{parameter['name']}`, default `{parameter['schema'].get('default')}`."]
            answer = route["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
            if answer and "$ref" in answer:
                lines += ["", "Answer:", "", *_fields(answer, schemas)]
    return _HEADER + "\n".join(lines) + "\n"


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of a job that is not run."""
    import asyncio
    from contextlib import AsyncExitStack

    from palestra.config import parse_config
    from palestra.runtime.local import local_job
    from palestra.runtime.page import create_job_app

    async def read(folder: str) -> dict[str, Any]:
        config = parse_config({"run_dir": folder, "engine": {"kind": "fake"}, "server": {"port": 0}})
        async with AsyncExitStack() as stack:
            job = await stack.enter_async_context(local_job(config, lambda kind, data: None))
            return create_job_app(job.plane).openapi()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(read(folder))


def pages() -> dict[str, str]:
    """File name to text."""
    return {
        "metrics.md": metrics_page(),
        "doctor.md": doctor_page(),
        "configuration.md": configuration_page(),
        "api.md": api_page(openapi_document()),
        "python.md": _HEADER + python_page(),
    }


def _section(model: type[Section], path: str, lines: list[str], kind: str | None = None) -> None:
    """Add a section's table, and those of the sections in it.

    Args:
        model: the section.
        path: its dotted name in TOML; empty: the whole file.
        lines: what is added to.
        kind: the value of the key that chooses it, where a section of another kind may stand in its place.
    """
    doc = (model.__doc__ or "").strip().split("\n")[0]
    lines += [
        "",
        _heading(path) if kind is None else f'### `{model.chosen_by} = "{kind}"`',
        "",
        doc,
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    inner: list[tuple[str, type[Section], str | None]] = []
    unions: list[tuple[str, str]] = []
    same: list[str] = []
    for name, field in model.model_fields.items():
        kinds = sections_of(field.annotation)
        within = f"{path}.{name}" if path else name
        if len(kinds) > 1 and field.default is None and path:  # the tables stand where there is always one of them
            lines.append(f"| `{name}` | table | `none` | {field.description} |")
            continue
        if kinds and get_origin(field.annotation) is tuple:  # their keys stand elsewhere on the page
            lines.append(f"| `{name}` | list of tables | required | {field.description} |")
            continue
        if len(kinds) > 1:
            unions.append((within, kinds[0].chosen_by))
        for nested in kinds:
            chosen = chosen_kind(nested) if len(kinds) > 1 else None
            table = {dict: f"{within}.NAME", list: f"[{within}]"}.get(get_origin(field.annotation), within)
            inner.append((table, nested, chosen))
        if kinds:
            continue
        row = _row(name, field, lines if kind is not None else [])
        known = kind is not None and (name == model.chosen_by or _stands_above(row, name, lines))
        (same if known else lines).append(name if known else row)
    _end_table(lines, [name for name in same if name != model.chosen_by])
    for within, nested, chosen in inner:
        if unions and unions[0][0] == within:
            _, key = unions.pop(0)
            lines += [
                "",
                _heading(within),
                "",
                f"One of these tables, which `{key}` chooses. It refuses the keys of others.",
            ]
        _section(nested, within, lines, chosen)


def _end_table(lines: list[str], same: Sequence[str]) -> None:
    """Remove a table without rows, and name the keys that stand above already."""
    if lines[-1] == "|---|---|---|---|":
        del lines[-3:]
    if same:
        lines += ["", f"As above: {', '.join(f'`{name}`' for name in same)}."]


def _row(name: str, field: FieldInfo, above: Sequence[str]) -> str:
    """Return the line of a key; a meaning that stands above already is not written again."""
    meaning = field.description or ""
    default = "required" if field.default is PydanticUndefined else f"`{_toml(field.default)}`"
    known = any(_is_of(line, name, meaning) for line in above)
    return f"| `{name}` | {_type(field.annotation)} | {default} | {'As above.' if known else meaning} |"


def _stands_above(row: str, name: str, above: Sequence[str]) -> bool:
    """Return whether the nearest line of a key has the type, the default and the meaning of its row."""
    nearest = next((line for line in reversed(above) if line.startswith(f"| `{name}` |")), "")
    return row.endswith("| As above. |") and nearest.startswith(row.removesuffix("As above. |"))


def _heading(path: str) -> str:
    """Return the heading of the table at a dotted name."""
    return f"## `[{path}]`" if path else "## Top level"


def _is_of(line: str, name: str, meaning: str) -> bool:
    """Return whether a line of a table has this key and its meaning."""
    return line.startswith(f"| `{name}` |") and line.endswith(f"| {meaning} |")


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type(a) for a in get_args(annotation) if a is not type(None))
    if origin is tuple:
        return "[" + ", ".join("…" if a is ... else _type(a) for a in get_args(annotation)) + "]"
    name = str(annotation.__name__)
    return {"str": "text", "Path": "path", "bool": "true or false"}.get(name, name)


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[str]:
    found = schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    required = set(found.get("required", ()))
    lines = ["| field | type | meaning |", "|---|---|---|"]
    for name, field in found.get("properties", {}).items():
        needed = " (required)" if name in required else ""
        lines.append(f"| `{name}`{needed} | {_json_type(field)} | {field.get('description', '')} |")
    return lines


def _json_type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[1]
    if "anyOf" in field:
        return " or ".join(_json_type(option) for option in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_json_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def main() -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Write the reference pages from the code.")
    parser.add_argument("docs", type=Path, help="the folder with the folder `reference`")
    folder: Path = parser.parse_args().docs / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        say(str(folder / name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
