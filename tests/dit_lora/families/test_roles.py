"""The size of a family's roles: how many classes of this project each has, and how many public members."""

import pytest
from family_cases.subject import Subject

MAX_CLASSES = 3
"""The family's class, a base that several families share, and the role."""
MAX_MEMBERS = 20


@pytest.mark.parametrize("role", ["encoders", "denoiser", "sampler"])
def test_a_role_has_few_classes_and_few_members(subject: Subject, role: str) -> None:
    value = getattr(subject.checkpoint, role)
    classes = [kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("dit_lora.")]
    members = [name for name in dir(value) if not name.startswith("_")]
    print(f"{role}: {' -> '.join(classes)}; {len(members)} members: {', '.join(members)}")  # noqa: T201
    assert len(classes) <= MAX_CLASSES, classes
    assert len(members) <= MAX_MEMBERS, members


def test_the_facts_have_few_classes(subject: Subject) -> None:
    info = subject.checkpoint.info
    classes = [kind.__name__ for kind in type(info).__mro__ if kind.__module__.startswith("dit_lora.")]
    assert len(classes) <= MAX_CLASSES, classes
