"""Fields that hold one of several sections, which `kind` chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from palestra.config.section import Section


def schema_by_kind(
    found: Mapping[str, type[Section]], kind_of: Callable[[Any], Any], handler: GetCoreSchemaHandler
) -> CoreSchema:
    """Return the schema of such a field."""

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
