"""Each test has its own folder and guard."""

from loop_isolation import (  # noqa: F401  pytest finds fixtures by their names here
    _in_a_folder,
    _with_no_guard_of_another_test,
)
