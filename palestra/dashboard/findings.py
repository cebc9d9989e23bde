"""The doctor's findings for a run of the page."""

from __future__ import annotations

from dataclasses import asdict

from palestra.dashboard.answers import FindingAnswer, FindingsAnswer
from palestra.dashboard.runs import Run
from palestra.doctor.examination import RULES, add_facts, examine_store


def read_findings(run: Run) -> FindingsAnswer:
    """Return the findings over all steps of a run."""
    config, kept, more = run.config, run.memory.examined, True
    while more:  # each with the whole time of a connection; what was read is kept where one takes too long
        with run.open() as connection:
            more = add_facts(connection, kept)
    with run.open() as connection:
        found = examine_store(connection, config, run.folder, kept)
    return FindingsAnswer(
        run=run.name,
        step=found.step,
        steps=found.steps,
        rules=len(RULES),
        findings=[FindingAnswer(**asdict(finding)) for finding in found.findings],
    )
