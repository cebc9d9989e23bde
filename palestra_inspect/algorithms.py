"""`palestra algorithms`: lists the values of `algorithm.name`, with formula, paper, settings and requirements."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command
from palestra.errors import ConfigError
from palestra.terminal import NO_WIDTH, say
from palestra_inspect.paragraphs import say_paragraph

if TYPE_CHECKING:
    from pydantic import BaseModel

    from palestra.config import AlgorithmConfig


def add_algorithms(commands: Any) -> None:
    """Add the command `algorithms`, which lists them all or shows one."""
    parser = add_command(
        commands,
        "algorithms",
        _run,
        "list the algorithms that ship, or show one: its formula, paper, settings, and what it needs",
        "  palestra algorithms\n  palestra algorithms dapo",
    )
    parser.add_argument("name", nargs="?", help="show this one; without it, all are listed")


def _run(arguments: argparse.Namespace) -> None:
    """Print the list, or one algorithm."""
    from palestra.algorithms.registry import ALGORITHMS
    from palestra.config import parse_config

    if arguments.name is None:
        width = max(map(len, ALGORITHMS))
        for name, algorithm in ALGORITHMS.items():
            assert algorithm.about is not None
            say_paragraph(f"{name:<{width}}  ", algorithm.about.summary, NO_WIDTH)
        say('\nto train with one: [algorithm] name = "…" in job.toml, or --set algorithm.name=…')
        return
    config = parse_config({"algorithm": {"name": arguments.name}}, source="palestra algorithms").algorithm
    if config.name not in ALGORITHMS:
        raise ConfigError(f"{config.name!r} is a class of your own, of which nothing is known here")
    about = ALGORITHMS[config.name].about
    assert about is not None
    say_paragraph(f"{config.name}: ", about.summary)
    say()
    for title, text in (("formula", about.formula), ("paper", about.paper)):
        say_paragraph(f"{title + ':':<10}", text)
    say_paragraph("needs:    ", "; ".join((*about.needs, *_outputs(config))) or "nothing more than every job")
    say("\nsettings:")
    for key, default, description in _settings(type(config), config.model_dump(mode="json")):
        if key != "name":
            say(f"\n  {key} = {default}")
            say_paragraph("      ", description)


def _settings(section: type[BaseModel], values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield dotted key, default as text and description of each setting of a section, recursively."""
    from palestra.config.section import sections_of

    for key, field in section.model_fields.items():
        inner, value = sections_of(field.annotation), values.get(key)
        if not inner or value is None:
            shown = "none" if value is None else json.dumps(value)
            yield f"{above}{key}", "(has to be given)" if field.is_required() else shown, field.description or ""
        if inner:
            made = inner[0].model_construct()  # without values for keys that have to be given
            yield from _settings(inner[0], value or made.model_dump(mode="json"), f"{above}{key}.")


def _outputs(config: AlgorithmConfig) -> list[str]:
    """Describe what the trainer must compute for an algorithm before the loss."""
    from palestra.algorithms.registry import create_algorithm

    return [f"a forward pass for {name}" for name in sorted(create_algorithm(config).needs)]
