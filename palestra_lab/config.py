"""`ComparisonConfig`: a grid of algorithms, scenarios and seeds, read from a compare.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from palestra.config.loading import read_toml
from palestra.config.section import Identifier, Positive, Section, explain
from palestra.errors import ConfigError

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[list[Seed], Field(min_length=1, max_length=100)]
Table = dict[str, Any]


class AlgorithmEntry(BaseModel):
    """One algorithm of a comparison: the job's `[algorithm]`, and changes of other keys."""

    model_config = ConfigDict(extra="allow", frozen=True)  # the rest is checked as the job's `[algorithm]`

    name: str | None = Field(None, description="`algorithm.name`. None: the key of the entry.")
    overrides: Table = Field({}, description="Keys of the job that this algorithm needs otherwise, as nested tables.")

    @property
    def settings(self) -> Table:
        """Return the keys of the entry besides `name` and `overrides`."""
        return dict(self.model_extra or {})


class ScenarioEntry(Section):
    """One scenario of a comparison: a job, its environment, and a budget of sampled tokens."""

    title: str | None = Field(None, description="Heading on the page. None: the key of the scenario.")
    about: str = Field("", description="Text for the page, in Markdown.")
    job: Path | None = Field(None, description="The base job, in TOML, relative to this file.")
    play: str | None = Field(
        None,
        description="`path/to/file.py:function` (relative to this file) or `module:function`, which returns what "
        "`palestra.train` is given, as a mapping: `rollout`, `environment` or `reward`, `tasks`, `validation_tasks`, "
        "and `config` if there is no `job`. None: the job's own environment is played.",
    )
    arguments: Table = Field({}, description="Arguments of the function `play`, by keyword.")
    overrides: Table = Field({}, description="Keys of the job that this scenario has otherwise, as nested tables.")
    token_budget: Positive = Field(description="Sampled tokens of each run.")
    threshold: float = Field(description="Validation reward of which the page says when it is reached first.")
    best: float | None = Field(None, description="The best possible validation reward, where it is known.")
    seeds: Seeds | None = Field(None, description="Seeds of this scenario. None: those of the comparison.")
    algorithms: list[str] | None = Field(None, description="Algorithms that are compared here. None: all.")
    policies: Annotated[list[Identifier], Field(min_length=1)] | None = Field(
        None,
        description="Policies whose validation rewards are compared, each in tables of its own, where the job trains "
        "several. None: all that it trains.",
    )
    tuned: dict[str, AlgorithmEntry] = Field(
        {}, description="Settings and overrides of an algorithm that hold in this scenario only, by its key."
    )

    @model_validator(mode="after")
    def _has_a_job(self) -> ScenarioEntry:
        if self.job is None and self.play is None:
            raise ValueError('name a base job (job = "job.toml"), or a function (play = "recipe.py:scenario")')
        if self.arguments and self.play is None:
            raise ValueError("`arguments` are for the function `play`, and there is none")
        return self


class ComparisonConfig(Section):
    """A comparison: every algorithm in every scenario with every seed, for the same number of sampled tokens."""

    name: Identifier = Field("comparison", description="Name of the comparison, and of its folder below runs/.")
    title: str = Field("A comparison of algorithms", description="Heading of the page.")
    about: str = Field("", description="Text for the page, below its heading, in Markdown.")
    findings: str = Field("", description="What was found, in Markdown; people write it after they have read the page.")
    output: Path | None = Field(None, description="Folder of all runs, relative to this file. None: `runs/NAME`.")
    seeds: Seeds = Field([0, 1, 2, 3, 4], description="Each seed is one run of each algorithm in each scenario.")
    evaluations: Positive = Field(10, description="Validations of a run after the first, evenly over its tokens.")
    checkpoints: Literal["newest", "none"] = Field(
        "newest", description="Checkpoints that stay when a run is finished: the newest one, or none."
    )
    scenarios: dict[Identifier, ScenarioEntry] = Field(min_length=1, description="The scenarios, by name.")
    algorithms: dict[Identifier, AlgorithmEntry] = Field(min_length=1, description="The algorithms, by name.")

    @model_validator(mode="after")
    def _names_exist(self) -> ComparisonConfig:
        known = ", ".join(self.algorithms)
        for key, scenario in self.scenarios.items():
            for place, names in (("algorithms", scenario.algorithms or ()), ("tuned", scenario.tuned)):
                for name in names:
                    if name not in self.algorithms:
                        raise ValueError(f"scenarios.{key}.{place} names {name!r}; there are {known}")
            for name, entry in scenario.tuned.items():
                if entry.name is not None:
                    raise ValueError(f"scenarios.{key}.tuned.{name} has a `name`; only [algorithms.{name}] may have it")
        for seeds in (self.seeds, *(scenario.seeds or () for scenario in self.scenarios.values())):
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"a seed is named twice in {list(seeds)}")
        return self

    @property
    def folder(self) -> Path:
        """Return the folder of all runs: `output`, or `runs/<name>`."""
        return self.output if self.output is not None else Path("runs") / self.name


def load_comparison(path: Path) -> ComparisonConfig:
    """Read a comparison from a TOML file; relative `job`, `play` and `output` are relative to the file.

    They become absolute, so that runs do not depend on the current directory.
    """
    data = read_toml(path)
    try:
        found = ComparisonConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, ComparisonConfig)}") from error
    scenarios = {}
    for key, scenario in found.scenarios.items():
        changes: Table = {}
        if scenario.job is not None:
            changes["job"] = (path.parent / scenario.job).resolve()
        if scenario.play is not None:
            changes["play"] = resolved_play(scenario.play, path.parent)
        scenarios[key] = scenario.model_copy(update=changes)
    output = None if found.output is None else path.parent.absolute() / found.output.expanduser()
    return found.model_copy(update={"scenarios": scenarios, "output": output})


def resolved_play(play: str, folder: Path) -> str:
    """Return a function's name with the absolute path of its file, unless it is in a module."""
    file, colon, function = play.rpartition(":")
    return f"{(folder / file).resolve()}{colon}{function}" if file.endswith(".py") else play
