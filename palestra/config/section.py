"""What all tables of a configuration have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # of BaseModel; pydantic exports it nowhere else

from palestra.config.explaining import explain
from palestra.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class _InWords(ModelMetaclass):
    """Makes a section that is written in Python say what is wrong with it as one that is read from TOML does."""

    if not TYPE_CHECKING:  # the fields are what a type checker is to look at

        def __call__(cls, *args: Any, **values: Any) -> Any:
            """Make a section.

            Raises:
                ConfigError: an unknown key, or a value out of range.
            """
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise ConfigError(f"{cls.__name__}: {explain(error, cls)}") from None


class Section(BaseModel, metaclass=_InWords):
    """Base of all parts: unknown keys are errors, values can't be changed after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
