"""Facts of families: read in an instant, and each in its own place."""

import subprocess
import sys

import pytest

from dit_lora.families import get_families
from dit_lora.families.family import License

FACTS = """
import sys
from dit_lora.families import get_families
assert all(family.tiny_variants and family.default_recipe for family in get_families().values())
assert not {"torch", "numpy", "diffusers", "transformers"} & set(sys.modules)
"""


def test_facts_are_read_without_torch() -> None:
    subprocess.run([sys.executable, "-c", FACTS], check=True)


def test_a_tiny_variant_belongs_to_one_family() -> None:
    families = get_families()
    assert all(family.name == name for name, family in families.items())
    variants = [variant for family in families.values() for variant in family.tiny_variants]
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize(
    ("base", "link"),
    [
        (
            "Efficient-Large-Model/Sana_600M_512px_diffusers",
            "https://huggingface.co/Efficient-Large-Model/Sana_600M_512px_diffusers/blob/main/LICENSE.txt",
        ),
        ("somebody/Sana_600M", None),
    ],
)
def test_a_licence_without_a_link_is_in_the_bases_own_repository(base: str, link: str | None) -> None:
    license_name = get_families()["sana"].get_license(base)
    assert license_name == (License("other", "nscl-v2-custom", link) if link else None)
