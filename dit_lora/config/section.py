"""Base class of a recipe's sections: frozen, no unknown keys, bounded numbers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


def _iterate_types(annotation: Any) -> Iterator[Any]:
    """Yield a type annotation and all types nested in it, as in `Annotated` and unions."""
    yield annotation
    # Arguments of `Annotated` that are no types, such as Field(...), are yielded too and match nothing.
    for part in get_args(annotation):
        yield from _iterate_types(part)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # Runs before pydantic's own conversion, for every field of every section.
        types = list(_iterate_types(cls.model_fields[info.field_name or ""].annotation))
        # Python's bool is an int: pydantic would accept `yes` in YAML as the number 1.
        if isinstance(value, bool) and bool not in types and (int in types or float in types):
            raise ValueError(f"Input should be a number, not {str(value).lower()}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _wrap_single_text_in_list(cls, value: Any, info: ValidationInfo) -> Any:
        # `run.trackers=wandb` means a list of one.
        if not isinstance(value, str):
            return value
        annotation = cls.model_fields[info.field_name or ""].annotation
        # The types of `tuple[str, ...] | None`.
        choices = (annotation,) if get_origin(annotation) is tuple else get_args(annotation)
        items = [get_args(choice)[0] for choice in choices if get_origin(choice) is tuple]
        is_text_list = str not in choices and any(item is str or get_origin(item) is Literal for item in items)
        return (value,) if is_text_list else value
