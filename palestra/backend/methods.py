"""The methods of `Engine` and `Trainer` that go over the socket as they are, with the types of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from palestra.backend.typed import Arrays, typed
from palestra.errors import InvalidRequest
from palestra.trainer.base import Trainer

_OF_TRAINER = (
    "create",
    "forward",
    "forward_backward",
    "optim_step",
    "untrainable",
    "choices",
    "save",
    "save_weights",
    "load",
    "remove",
)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a protocol.

    Attributes:
        name: of the method.
        parameters: annotations, by name.
        optional: names of those that have a default.
        returns: annotation of the result.
    """

    name: str
    parameters: Mapping[str, Any]
    optional: frozenset[str]
    returns: Any

    @classmethod
    def of(cls, protocol: type, name: str) -> Method:
        """Return a method by its name."""
        hints = get_type_hints(getattr(protocol, name))
        known = inspect.signature(getattr(protocol, name)).parameters.values()
        optional = frozenset(one.name for one in known if one.default is not inspect.Parameter.empty)
        return cls(name, {key: hint for key, hint in hints.items() if key != "return"}, optional, hints["return"])

    def arguments(self, given: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the arguments of a call that came in a message.

        Raises:
            InvalidRequest: one is missing, unknown or of another type.
        """
        if unknown := given.keys() - self.parameters.keys():
            raise InvalidRequest(f"{self.name} has no argument {min(unknown)!r}")
        if missing := self.parameters.keys() - given.keys() - self.optional:
            raise InvalidRequest(f"{self.name} lacks the argument {min(missing)!r}")
        return {key: typed(self.parameters[key], value, arrays, key) for key, value in given.items()}


TRAINER_METHODS = {name: Method.of(Trainer, name) for name in _OF_TRAINER}
"""Methods of a trainer that are called with what the message has, under the policy's full name."""
