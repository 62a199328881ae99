"""Help that names values as users write them (PATH, N, TEXT), where Typer prints Python types."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from typer.core import TyperArgument, TyperCommand, TyperGroup

_VALUE_NAMES = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}


class PlainCommand(TyperCommand):
    """A verb."""

    def get_params(self, ctx: Any) -> Any:
        return _name_parameter_values(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of verbs."""

    def get_params(self, ctx: Any) -> Any:
        return _name_parameter_values(super().get_params(ctx))


def _name_parameter_values(params: Iterable[Any]) -> Iterable[Any]:
    for param in params:
        if isinstance(param, TyperArgument):
            # Its own name and its help say what it is.
            param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
        elif param.metavar is None:
            annotation = param.type_descriptor.annotation
            # Repeatable options are lists of what they take.
            element = (get_args(annotation) or (annotation,))[0]
            # None leaves a choice's values as they are.
            param.metavar = _VALUE_NAMES.get(element)
    return params
