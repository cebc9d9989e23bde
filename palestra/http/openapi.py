"""The OpenAPI document: describes bodies that routes read themselves like those that FastAPI reads."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


def request_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that a route reads itself, for FastAPI's `openapi_extra`.

    Args:
        kind: the model of the body.
    """
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Make the application's OpenAPI document contain each model once, under its name."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        known = document["components"]["schemas"]
        for methods in document["paths"].values():
            for route in methods.values():
                content = route.get("requestBody", {}).get("content", {}).get("application/json")
                if content is not None and "$ref" not in content["schema"]:
                    content["schema"] = {"$ref": _add(content["schema"], known)}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's guide replaces the method in this way


def _add(schema: dict[str, Any], known: dict[str, Any]) -> str:
    """Add a schema and its definitions to the known ones, and return the reference to it.

    Raises:
        ValueError: another model has the same name.
    """
    whole = dict(schema)
    for name, definition in (whole.pop("$defs", {}) | {schema["title"]: whole}).items():
        if known.setdefault(name, definition) != definition:
            raise ValueError(f"two models are called {name}")
    return f"#/components/schemas/{schema['title']}"
