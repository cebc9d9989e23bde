"""Write the reference pages of docs/ from the code (`make docs`); a test checks that they are current."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from commands_page import commands_page
from configuration_page import configuration_page
from python_reference import python_page

from palestra.doctor.evidence import ALARM, FALSE_ALARMS, OPEN_BETS
from palestra.doctor.examination import RULES
from palestra.doctor.rule import KEPT, RECENT
from palestra.learner.metrics import metric_tables
from palestra.terminal import say
from palestra.types.metrics import METRICS, OF_THE_JOB

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
        "*Strong evidence* is what the signs of [audits](../how-to/audits.md) need. The evidence of a step is the "
        "logarithm of an e-value: a number that is at most 1 on average while nothing is wrong, and larger the more "
        "the step speaks for the sign. Evidence is added up from step to step, and begins again at 0 when the sum is "
        f"negative. A sum of ln({OPEN_BETS}/{FALSE_ALARMS:g}) = {ALARM:.1f} or more is strong: while nothing is wrong, "
        f"all of these signs together get there at most once in {1 / FALSE_ALARMS:.0f} steps on average (an e-CUSUM: "
        "Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532).",
        "",
        "| code | the sign is there if | it usually means | try |",
        "|---|---|---|---|",
        *(f"| `{r.code}` | {r.formula} | {r.means} | {r.remedy} |" for r in RULES),
    ]
    return _HEADER + "\n".join(lines) + "\n"


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
    from palestra_live.routes import add_live_routes

    async def read(folder: str) -> dict[str, Any]:
        config = parse_config({"run_dir": folder, "engine": {"kind": "fake"}, "server": {"port": 0}})
        async with AsyncExitStack() as stack:
            job = await stack.enter_async_context(local_job(config, lambda kind, data: None))
            app = create_job_app(job.plane)
            add_live_routes(app, job.plane, cast(Any, None))  # no route is called
            return app.openapi()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(read(folder))


def pages() -> dict[str, str]:
    """File name to text."""
    return {
        "metrics.md": metrics_page(),
        "doctor.md": doctor_page(),
        "configuration.md": _HEADER + configuration_page(),
        "api.md": api_page(openapi_document()),
        "python.md": _HEADER + python_page(),
        "commands.md": _HEADER + commands_page(),
    }


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
