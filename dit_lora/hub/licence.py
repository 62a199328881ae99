"""The license of a result, as stated in its card."""

from dit_lora.families import get_family
from dit_lora.hub.contents import Contents
from dit_lora.hub.markdown import escape_markdown


def format_licence(contents: Contents) -> str:
    """A sentence on the license of the base, as far as it is known."""
    licence = get_family(contents.metadata["family"]).get_license(contents.base)
    if contents.base is None:
        return "Not stated: the base model was a local folder. What is derived from it is under its licence."
    where = f"[{escape_markdown(contents.base)}](https://huggingface.co/{contents.base})"
    if licence is None:
        return f"Not stated: see the licence of the base model, {where}, from which this is derived."
    # Custom licences have a name and a link, standard ones only an id.
    name = escape_markdown(licence.name or licence.id)
    named = f"[{name}]({licence.link})" if licence.link else name
    return f"{named}, the licence of the base model, {where}, from which this is derived."
