"""Base of all configuration tables: unknown keys are errors, and every mistake is one line.

The line names the key, the value and the nearest known key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails

from palestra.errors import ConfigError

TRL: Mapping[str, str] = {
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every_steps",
    "loss_type": "algorithm.loss_agg_mode",
    "lr_scheduler_type": "policies.NAME.optimizer.schedule",
    "max_completion_length": "policies.NAME.sampling.max_tokens",
    "max_prompt_length": "policies.NAME.max_context",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.epochs",
    "output_dir": "run_dir",
    "peft_config": "policies.NAME.adapter",
    "report_to": "tracking",
    "save_steps": "checkpoint.every_steps",
    "save_only_model": "checkpoint.optimizer",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.advantage_scale",
    "vllm_importance_sampling_correction": "algorithm.importance_sampling",
}
VERL: Mapping[str, str] = {
    "adv_estimator": "algorithm.name",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "gamma": "algorithm.discount",
    "grad_clip": "policies.NAME.optimizer.max_grad_norm",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "lam": "algorithm.gae_lambda",
    "lr": "policies.NAME.optimizer.learning_rate",
    "max_response_length": "policies.NAME.sampling.max_tokens",
    "norm_adv_by_std_in_grpo": "algorithm.advantage_scale",
    "ppo_epochs": "algorithm.epochs",
    "save_freq": "checkpoint.every_steps",
    "test_freq": "evaluation.every_steps",
    "total_training_steps": "steps",
    "train_batch_size": "rollout.groups_per_step",
}


def key_of_other_name(name: str) -> str | None:
    """Return the key for a name of TRL or verl, and whose name it is; None: unknown."""
    for library, keys in (("TRL", TRL), ("verl", VERL)):
        if name in keys:
            return f"{library}'s {name} is {keys[name]!r} here"
    return None


SHOWN = (int, float, str, bool, type(None), list, tuple)  # types whose values can be shown in a message, shortened


_IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Identifier = Annotated[str, Field(pattern=_IDENTIFIER)]
# Where a value may be a name or a table: pydantic has these in the places of mistakes, and users have not written them.
TAG_OF_NAME, TAG_OF_TABLE = "(name)", "(table)"
_PART = re.compile(r'"([^"]*)"(?=\.|$)|([^.]*)')  # of a dotted key; in quotes, it may have dots


Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
# Of a bound that large numbers switch off: no gradient or ratio comes near it, and float32 still holds it.
UNLIMITED = 1e30


class Mistake(NamedTuple):
    """A mistake in a configuration.

    Attributes:
        place: the parts of the key, as the user wrote it; (): it is not about one key.
        text: a sentence that names the key.
    """

    place: tuple[str, ...]
    text: str


def explain(error: ValidationError, root: type[Section]) -> str:
    """Return the first mistake of a configuration as a sentence. `root`: the section that was validated; keys in
    `error` are below it.
    """
    return _mistake(_in_order(error)[0], root).text  # of many thousand, explaining all would take minutes


def explain_all(error: ValidationError, root: type[Section]) -> list[Mistake]:
    """Return every mistake in an error; arguments as in `explain`."""
    return [_mistake(found, root) for found in _in_order(error)]


def _in_order(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors with misspelled keys before the required keys that are missing because of them."""
    return sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")


def _mistake(found: ErrorDetails, root: type[Section]) -> Mistake:
    loc = tuple(found["loc"])
    is_name = loc[-1:] == ("[key]",)  # a name that a user has chosen is wrong, and not what it stands for
    place, section = _walk(root, loc[:-1] if is_name else loc)
    dotted = dotted_key(place[:-1] if is_name else place)
    if found["type"] == "extra_forbidden":
        return Mistake(place, _unknown(place, section, root, found["input"]))
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "missing" and (field := section.model_fields.get(place[-1])) is not None and field.description:
        message = f"this key has to be given: {field.description.partition('. ')[0].rstrip('.')}"
    if found.get("ctx", {}).get("pattern") == _IDENTIFIER:
        message = "a name has 1 to 64 letters (a to z), digits, '.', '_' and '-', and begins with a letter or a digit"
    message += _given(found["type"], found["input"])
    return Mistake(place, f"{dotted}: {message}" if dotted else message)


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the sections that a field may hold: one, the kinds of a union, or none for a value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return list(annotation.alternatives())
    return [section for part in get_args(annotation) for section in sections_of(part)]


def chosen_kind(section: type[Section]) -> str:
    """Return the value of the key `chosen_by` that chooses a section of a union; for a free name, its form."""
    field = section.model_fields[section.chosen_by]
    return section.form_of_name if field.is_required() else str(field.default)


def _unknown(place: tuple[str, ...], section: type[Section], root: type[Section], given: Any) -> str:
    """Suggest a key for one that its section does not have."""
    *path, key = place
    dotted = dotted_key(place)
    known, others = list(section.model_fields), _alternatives(root, path)
    if having := [chosen_kind(other) for other in others if key in other.model_fields]:
        only = f"{others[0].chosen_by} = {', '.join(map(repr, having))}"
        if section.key_of_tables:
            tables = dotted_key((*path, section.key_of_tables))
            return f"{dotted!r} is a key of {only} only; write it into the tables of these kinds in {tables}"
        return f"{dotted!r} is a key of {only} only; known keys here: {', '.join(known)}"
    # An `epsilon` of a policy is AdamW's, and not TRL's, which bounds ratios.
    if path[:1] != ["policies"] and key not in known and (other_name := key_of_other_name(key)) is not None:
        return f"unknown key {dotted!r}; {other_name}"
    meant = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        or _keys_named(key, root)  # the same name in another table
        or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    )
    hint = f"did you mean {meant[0]!r}?" if meant else f"known keys here: {', '.join(known)}"
    return f"unknown key {dotted!r}; {hint}"


def dotted_key(place: Sequence[str]) -> str:
    """Return the parts of a key as users write them: joined by dots, with quotes around a part that has a dot."""
    return ".".join(f'"{part}"' if "." in part else part for part in place)


def key_parts(dotted: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, as written by `dotted_key`."""
    parts, at = [], 0
    while True:
        found = _PART.match(dotted, at)
        assert found is not None  # any text matches
        parts.append(found[2] if found[1] is None else found[1])
        at = found.end() + 1
        if at > len(dotted):
            return tuple(parts)


def _given(kind: str, value: Any) -> str:
    """Return the refused value as the end of a sentence, unless the message has it already."""
    if kind == "value_error" or not isinstance(value, SHOWN):
        return ""
    shown = repr(value)
    return f"; it is {shown if len(shown) <= 60 else shown[:59] + '…'}"


def _walk(root: type[Section], loc: tuple[int | str, ...]) -> tuple[tuple[str, ...], type[Section]]:
    """Return the path that a user has written, and the section of its last key."""
    place: list[str] = []
    section, rest = root, [str(step) for step in loc if step not in (TAG_OF_NAME, TAG_OF_TABLE)]
    while rest:
        step = rest.pop(0)
        place.append(step)
        field = section.model_fields.get(step)
        inner = [] if field is None else sections_of(field.annotation)
        if not inner or not rest:
            return (*place, *rest), section
        assert field is not None
        if get_origin(field.annotation) in (dict, tuple, list):  # the step is a name, or the place in a list
            place.append(rest.pop(0))
        if len(inner) > 1 and rest:
            kind = rest.pop(0)
            inner = [one for one in inner if chosen_kind(one) == kind]
        section = inner[0]
    return tuple(place), section


def _alternatives(root: type[Section], path: Sequence[str]) -> list[type[Section]]:
    """Return the kinds of section that a path may hold; one or none without a choice."""
    annotation: Any = root
    for step in path:
        if get_origin(annotation) in (dict, tuple, list):  # the step is a name that the user has chosen, or a place
            annotation = get_args(annotation)[1 if get_origin(annotation) is dict else 0]
            continue
        fields = [section.model_fields[step] for section in sections_of(annotation) if step in section.model_fields]
        if not fields:
            return []
        annotation = fields[0].annotation
    return sections_of(annotation)


def _keys_named(name: str, root: type[Section], above: str = "") -> list[str]:
    """Return the dotted keys of `root` whose last part is `name`, with NAME for the keys of a `dict[str, Section]`."""
    found = []
    for key, field in root.model_fields.items():
        if key == name and above:
            found.append(above + key)
        step = "NAME." if get_origin(field.annotation) is dict else ""
        for part in sections_of(field.annotation):
            found += _keys_named(name, part, f"{above}{key}.{step}")
    return found


if TYPE_CHECKING:
    _InWords = BaseModel  # type checkers see the signature that pydantic makes of the fields
else:

    class _Making(type(BaseModel)):
        """Metaclass that gives sections made in Python the same error messages as sections read from TOML."""

        def __call__(cls, *args: Any, **values: Any) -> Any:
            """Make a section, as pydantic does."""
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise ConfigError(f"{cls.__name__}: {explain(error, cls)}") from None

    class _InWords(BaseModel, metaclass=_Making):
        """Base class of sections."""


class Section(_InWords):
    """Base class of all tables: unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    chosen_by: ClassVar[str] = "kind"  # key whose value chooses one of several sections that a field may hold
    key_of_tables: ClassVar[str] = ""  # key of a list of tables, into which the keys of other kinds belong
    form_of_name: ClassVar[str] = ""  # how that value looks where it has no default, because users choose it

    @classmethod
    def alternatives(cls) -> Sequence[type[Section]]:
        """Return the sections that a field of this type may hold."""
        return (cls,)


def schema_by_kind(
    found: Mapping[str, type[Section]], kind_of: Callable[[Any], Any], handler: GetCoreSchemaHandler
) -> CoreSchema:
    """Return the schema of a field that holds one of several sections, which `kind` chooses."""

    def known(value: Any) -> Any:  # the error of pydantic's union would not name the key
        if not isinstance(value, dict | Section):
            raise ValueError(f"it is a table, such as {{kind = {next(iter(found), '…')!r}}}, and not {value!r}")
        if (kind := kind_of(value)) not in list(found):
            raise ValueError(f"kind is {kind!r} (known kinds: {', '.join(map(repr, found)) or 'none'})")
        return value

    check, tagged = BeforeValidator(known), tuple(Annotated[one, Tag(kind)] for kind, one in found.items())
    if len(tagged) < 2:  # a union needs two; without a kind, every table is refused
        return handler.generate_schema(Annotated[next(iter(found.values()), dict), check])
    union = Union[tagged]  # type: ignore[valid-type]  # noqa: UP007
    return handler.generate_schema(Annotated[union, Discriminator(kind_of), check])
