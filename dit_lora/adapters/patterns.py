"""Bounds on the regular expressions in an adapter's config, which PEFT matches against every layer's name.

A file that somebody else wrote may hold an expression that backtracks for years, such as `(a+)+$`. An expression is
accepted if the number of ways to match it is bounded: repeats of single characters, each repeat at most as often as a
layer's name is long, and no repeat around another one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dit_lora.config.records import AdapterConfig, read_typed_json
from dit_lora.errors import DitLoraError

MAX_WAYS = 100_000
"""Upper bound of the ways to match one expression against one name. Two `.*` have 4,096, three 262,144."""
MAX_PATTERNS = 5_000
"""Two for every layer of the largest model here are about 3,000."""
MAX_PATTERN_CHARACTERS = 200_000
"""A list of every layer of a large model, joined into one expression, has about 50,000."""
_MAX_NAME_CHARACTERS = 64  # characters of a layer's name that an unbounded repeat can run over
_MAX_SHOWN_CHARACTERS = 60
_SINGLE_CHARACTER_OPS = {"LITERAL", "NOT_LITERAL", "IN", "ANY"}
_REPEAT_OPS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
# `re.compile` parses with this module; it has no public name.
_PARSER: Any = re._parser  # type: ignore[attr-defined]


def require_bounded_regex_patterns(config: Mapping[str, Any] | None, source: object) -> None:
    """Raise `DitLoraError` in one line if an expression in PEFT's config cannot be matched in bounded time.

    Args:
        config: PEFT's config as a file holds it, or metadata with the same keys; None is accepted.
        source: The file, for the message.
    """
    patterns = list(_iterate_patterns(config or {}))
    if len(patterns) > MAX_PATTERNS:
        raise DitLoraError(f"{source}: its config has {len(patterns):,} patterns, more than {MAX_PATTERNS:,}")
    for option, pattern in patterns:
        reason = find_unbounded_regex_reason(pattern)
        if reason:
            excerpt = pattern if len(pattern) <= _MAX_SHOWN_CHARACTERS else f"{pattern[:_MAX_SHOWN_CHARACTERS]}..."
            raise DitLoraError(f"{source}: {option} holds {excerpt!r}, which {reason}")


def read_peft_config(file: Path) -> dict[str, Any]:
    """Read PEFT's config file; raises `DitLoraError` if an expression in it cannot be matched in bounded time."""
    config = dict(read_typed_json(file, AdapterConfig))
    require_bounded_regex_patterns(config, file)
    return config


def find_unbounded_regex_reason(pattern: str) -> str | None:
    """Why a regular expression cannot be matched in bounded time; None if it can."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        return f"has {len(pattern):,} characters, more than {MAX_PATTERN_CHARACTERS:,}"
    try:
        # The parsed expression is a sequence of pairs: operation and argument.
        ways = _bound_regex_match_count(_PARSER.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a valid regular expression: {error}"
    except _UnboundedRegexError as error:
        return str(error)
    if ways > MAX_WAYS:
        return "could match in too many ways; name the layers, or use at most two `.*`"
    return None


class _UnboundedRegexError(Exception):
    """Raised for a regular expression whose number of ways to match cannot be bounded."""


def _iterate_patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield option and regular expression for each expression in PEFT's config.

    Lists of targets hold the ends of names, which are compared as text, so they are not included.
    """
    for option in ("target_modules", "exclude_modules"):
        if isinstance(config.get(option), str):
            yield option, config[option]
    layers_pattern = config.get("layers_pattern")
    # A text, a list of them, or None.
    for pattern in [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern or ():
        yield "layers_pattern", str(pattern)
    for option in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(option) or {}
        if not isinstance(patterns, Mapping):
            raise DitLoraError(f"{option} of the adapter's config must map layers to values")
        for pattern in patterns:
            yield option, pattern


def _bound_regex_match_count(items: Iterable[tuple[Any, Any]]) -> int:
    """Upper bound on the number of ways in which a regular expression can match: the product over its parsed items."""
    ways, looked_ahead = 1, 0
    for operation, argument in items:
        if str(operation) in ("ASSERT", "ASSERT_NOT"):
            # It is matched once for each way that leads to it, and adds none to what follows.
            looked_ahead += ways * _bound_regex_match_count(argument[1])
        else:
            ways *= _bound_operation_match_count(str(operation), argument)
        if ways + looked_ahead > MAX_WAYS:  # before the product grows without bound
            break
    return ways + looked_ahead


def _bound_operation_match_count(operation: str, argument: Any) -> int:
    if operation in _SINGLE_CHARACTER_OPS or operation == "AT":
        return 1
    # (group, flags added, flags removed, items).
    if operation == "SUBPATTERN":
        return _bound_regex_match_count(argument[-1])
    if operation == "ATOMIC_GROUP":
        return _bound_regex_match_count(argument)
    if operation == "BRANCH":
        # Alternatives exclude each other in one match, so their ways are added.
        return sum(_bound_regex_match_count(branch) for branch in argument[1])
    if operation not in _REPEAT_OPS:
        raise _UnboundedRegexError("uses a back-reference or a condition; write it without")
    min_count, max_count, repeated = argument
    # An optional item: absent, or matched in one of its ways.
    if max_count <= 1:
        return 1 + _bound_regex_match_count(repeated)
    parts = [str(operation) for operation, _ in repeated]
    if len(parts) != 1 or parts[0] not in _SINGLE_CHARACTER_OPS:
        raise _UnboundedRegexError("repeats a group, which can take years to match; repeat single characters only")
    # A repeat of single characters can end after any number of them between the bounds.
    return 1 + min(max_count, _MAX_NAME_CHARACTERS) - min(min_count, _MAX_NAME_CHARACTERS)
