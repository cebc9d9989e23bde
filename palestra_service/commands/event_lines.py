"""Descriptions of a job's events, a line each, for `palestra submit --watch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from palestra.terminal import one_line, say
from palestra.types.metrics import of_policies, win_rate_words
from palestra.types.states import LOSSES

if TYPE_CHECKING:
    from palestra_control.job import Job


def show_events(job: Job) -> int:
    """Print a line for each event until the job is over; return 0 if it completed, 130 after Ctrl-C."""
    try:
        policy = trained_of_several(job.view().config)
        for event in job.events():
            if line := describe(event.kind, event.data, policy):
                say(line)
    except KeyboardInterrupt:
        say(f"\nthe job continues; see how it goes with: palestra top, palestra logs -f {job.job_id}")
        return 130
    return 0 if job.view().state == "completed" else 1


def trained_of_several(config: Mapping[str, Any]) -> str:
    """Return the name of the only policy that a job with several policies trains; empty otherwise."""
    from palestra.config.policy import not_frozen

    policies = config.get("policies") or {}
    trained = [str(name) for name in not_frozen(policies)]
    return trained[0] if len(policies) > 1 and len(trained) == 1 else ""


def describe(kind: str, data: Mapping[str, Any], policy: str) -> str:
    """Describe an event; return an empty text for one that is not printed. `policy`: whose reward a step has, if the
    metrics do not say it; empty: the job's only one.
    """
    if kind == "state":
        return one_line(f"{data['state']}: {data['reason']}")
    if kind == "step":
        return _step(data, one_line(policy))
    if kind == "warning":
        return one_line(f"warning: {data['text']}")
    if kind in (*LOSSES, "tasks_grouped", "tasks_left_out", "estimate", "judge_doubtful", "version_quarantined"):
        return one_line(data["text"])
    if kind == "serving":
        return one_line(f"serving {data['model']}")
    if kind == "served":
        return one_line(f"served {data['calls']} calls")
    if kind == "saved":
        whose = "" if policy else data.get("policy", "")  # of several that are trained
        return one_line(f"{whose} saved after step {data['step']}".lstrip())
    return ""


def _step(row: Mapping[str, Any], policy: str) -> str:
    """Return the metrics of a step as a line; see `describe` for `policy`."""
    parts = [f"step {int(row['step']):>4}"]
    for own, mean in of_policies(row, "train/reward_mean").items():
        parts.append(f"{one_line(own) or policy} reward {mean:6.2f}".lstrip())
    for own, mean in of_policies(row, "validation/reward_mean").items():
        parts.append(f"{one_line(own)} validation {mean:5.2f}".lstrip())
    parts += filter(None, [win_rate_words(row)])
    if "time/step_seconds" in row:
        parts.append(f"{row['time/step_seconds']:6.1f} s")
    return "   ".join(parts)
