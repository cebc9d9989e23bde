"""`Section`, the base class of all tables of a configuration, and types that several tables use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # exported nowhere else

from palestra.config.explaining import explain
from palestra.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class _InWords(ModelMetaclass):
    """Metaclass that gives sections made in Python the same error messages as sections read from TOML."""

    if not TYPE_CHECKING:  # type checkers see the signature that pydantic makes of the fields

        def __call__(cls, *args: Any, **values: Any) -> Any:
            """Make a section, as pydantic does.

            Raises:
                ConfigError: a key is unknown, or a value is out of range.
            """
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise ConfigError(f"{cls.__name__}: {explain(error, cls)}") from None


class Section(BaseModel, metaclass=_InWords):
    """Base class of all tables: unknown keys are errors, and values can't be changed after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
