"""`ToolSpec`: a tool that is offered to a model, in OpenAI's form, as requests and conversations have it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

MAX_SCHEMA_BYTES = 65_536
MAX_TOOLS = 1000  # of one call
FunctionName = Annotated[str, Field(min_length=1, max_length=200)]


def _small(schema: Any) -> Any:
    try:
        size = len(orjson.dumps(schema))
    except TypeError as error:
        raise ValueError(str(error)) from None
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of {size} bytes is over the limit of {MAX_SCHEMA_BYTES}")
    return schema


Schema = Annotated[dict[str, JsonValue], BeforeValidator(_small)]


class FunctionSpec(BaseModel):
    """A tool's name, its purpose, and the JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None


class ToolSpec(BaseModel):
    """A tool that the model may call, in OpenAI's form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["function"]
    function: FunctionSpec
