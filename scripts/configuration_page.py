"""docs/reference/configuration.md: every key of a job, from the sections of `JobConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from palestra.config import JobConfig
from palestra.config.section import Section, chosen_kind, sections_of
from palestra_live.config import LiveConfig
from palestra_service.jobs.rules import CAPS

Kinds = Sequence[tuple[str, type[Section]]]  # sections that may stand at one place, and the value that chooses each


def configuration_page() -> str:
    """Return the page."""
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
    _section(LiveConfig, "live", lines)
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
        "[change each of them](../how-to/service-rules.md). `palestra run` and `palestra train` have no caps but the "
        "bounds of the keys themselves.",
        "",
        "| key | at most |",
        "|---|---|",
        *(f"| `{key}` | {cap:,} |" for key, cap in CAPS.items()),
    ]
    return "\n".join(lines) + "\n"


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


def _section(model: type[Section], path: str, lines: list[str]) -> None:
    """Add a section's table, and those of the sections in it."""
    lines += ["", _heading(path), "", _first_line(model)]
    rows = [_row(name, field) for name, field in model.model_fields.items() if _has_row(field, path)]
    if rows:
        lines += ["", "| key | type | default | meaning |", "|---|---|---|---|", *rows]
    for name, field in model.model_fields.items():
        if not _has_row(field, path):
            _nested(_within(path, name, field), field, lines)


def _nested(path: str, field: FieldInfo, lines: list[str]) -> None:
    """Add the tables of the section, or of the kinds of sections, that a field has."""
    kinds = sections_of(field.annotation)
    if len(kinds) == 1:
        _section(kinds[0], path, lines)
        return
    key = kinds[0].chosen_by
    found = [(chosen_kind(kind) or "", kind) for kind in kinds]
    lines += ["", _heading(path), "", f"`{key}` chooses what it is. A key of another kind is refused.", ""]
    lines += [
        f"| `{key}` | what it is |",
        "|---|---|",
        *(f'| `"{name}"` | {_first_line(kind)} |' for name, kind in found),
    ]
    _of_kinds(path, found, lines)


def _of_kinds(path: str, kinds: Kinds, lines: list[str]) -> None:
    """Add one table of the keys of all kinds, and those of the sections in them."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    inner: dict[str, list[tuple[str, type[Section]]]] = {}
    for kind, model in kinds:
        for name, field in model.model_fields.items():
            if not _has_row(field, path):
                inner.setdefault(_within(path, name, field), []).append((kind, sections_of(field.annotation)[0]))
            elif name != model.chosen_by:
                row = rows.setdefault((name, _type_of(field), field.description or ""), {})
                row.setdefault(_default(field), []).append(kind)
    lines += ["", "| key | type | default | of | meaning |", "|---|---|---|---|---|"]
    for (name, kind_of_value, meaning), defaults in rows.items():
        of = [kind for kind, _ in kinds if any(kind in found for found in defaults.values())]
        lines.append(f"| `{name}` | {kind_of_value} | {_defaults(defaults)} | {_named(of, kinds)} | {meaning} |")
    for within, found in inner.items():
        docs = dict.fromkeys(_first_line(model) for _, model in found)
        lines += ["", _heading(within), "", f"Of {_named([kind for kind, _ in found], kinds)}. {' '.join(docs)}"]
        _of_kinds(within, found, lines)


def _defaults(defaults: dict[str, list[str]]) -> str:
    """Return a default, or several: the most frequent one first, each other one with its kinds."""
    first, *others = sorted(defaults, key=lambda default: -len(defaults[default]))
    return "; ".join([first, *(f"{default} ({', '.join(defaults[default])})" for default in others)])


def _named(of: Sequence[str], kinds: Kinds) -> str:
    """Return the kinds that have a key, or the few that have it not."""
    others = [kind for kind, _ in kinds if kind not in of]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < len(of) / 2 else ", ".join(of)


def _has_row(field: FieldInfo, path: str) -> bool:
    """Return whether a field is a row of its section's table, and not a table of its own."""
    kinds = sections_of(field.annotation)
    optional = bool(path) and len(kinds) > 1 and field.default is None  # its tables stand at the top level
    return not kinds or optional or get_origin(field.annotation) is tuple


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_type_of(field)} | {_default(field)} | {field.description or ''} |"


def _type_of(field: FieldInfo) -> str:
    """Return the type of a row's value."""
    if not sections_of(field.annotation):
        return _type(field.annotation)
    return "list of tables" if get_origin(field.annotation) is tuple else "table"


def _default(field: FieldInfo) -> str:
    return "required" if field.default is PydanticUndefined else f"`{_toml(field.default)}`"


def _within(path: str, name: str, field: FieldInfo) -> str:
    """Return the dotted name of a section in a section."""
    within = f"{path}.{name}" if path else name
    if get_origin(field.annotation) is list:
        return f"[{within}]"
    return f"{within}.NAME" if get_origin(field.annotation) is dict else within


def _first_line(model: type[Section]) -> str:
    return (model.__doc__ or "").strip().split("\n")[0]


def _heading(path: str) -> str:
    """Return the heading of the table at a dotted name."""
    return f"## `[{path}]`" if path else "## Top level"


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
