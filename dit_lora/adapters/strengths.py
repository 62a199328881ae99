"""Strengths of an adapter as a user types them."""

import math

from dit_lora.errors import DitLoraError


def parse_comma_separated_numbers(
    text: str, name: str = "strengths", max_numbers: int | None = None
) -> tuple[float, ...]:
    """Parse numbers with commas between them, such as 0,0.5,1.

    Args:
        text: What was typed.
        name: The option or field, for the message.
        max_numbers: None for any number of them.

    Raises:
        DitLoraError: If they are not numbers, not finite, equal to each other, or too many.
    """
    try:
        # Spaces around a number are allowed.
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise DitLoraError(f"{name} must be numbers, such as 0,0.5,1; got {text[:80]!r}") from error
    # Equal strengths would write the same file twice.
    if not all(map(math.isfinite, numbers)) or len(set(numbers)) < len(numbers):
        raise DitLoraError(f"{name} must be finite numbers without repetition; got {text[:80]!r}")
    # Each one is a sample, or a file, to be made.
    if max_numbers is not None and len(numbers) > max_numbers:
        raise DitLoraError(f"{name} must be at most {max_numbers} numbers; got {len(numbers)}")
    return numbers
