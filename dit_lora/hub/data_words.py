"""Say in a card what a run was trained on, and any text so that Markdown shows it as it is."""

import re
from collections.abc import Iterator, Mapping

from dit_lora.hub.contents import Contents
from dit_lora.redact import redacted_words

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&])")


def plain(text: object) -> str:
    """Return the text on one line that Markdown shows as it is, in a paragraph and in a table."""
    return _SPECIAL.sub(r"\\\1", redacted_words(one_line(str(text))))


def one_line(text: str) -> str:
    """Return the text with each stretch of white space as one space."""
    return " ".join(text.split())


def data_lines(contents: Contents) -> Iterator[str]:
    """Yield what the data was, as counts."""
    data = contents.facts["data"]
    samples = f"{data['samples']:,}"
    if data["kind"] == "conversations":
        media = ", ".join(
            f"{count:,} about {_about(kind)}" for kind, count in data["by_media"].items()
        )
        yield f"{samples} conversations: {media}; {data['answer_tokens']['sum']:,} answer tokens"
    else:
        cut = "" if data["samples"] == data["clips"] else f", cut into {samples} samples"
        yield f"{data['clips']:,} {data['kind']}{cut}"
    if data["seconds"]:
        yield f"seconds of a clip: {_spread(data['seconds'])}; {data['seconds']['sum']:,g} in all"
    if data.get("shapes"):
        shapes = [f"{shape} ({count:,})" for shape, count in data["shapes"].items()]
        more = f" and {len(shapes) - 12} more" if len(shapes) > 12 else ""
        yield f"frames x height x width, with their samples: {', '.join(shapes[:12])}{more}"
    if data.get("caption_words"):
        distinct = data["distinct_captions"]
        yield f"words of a caption: {_spread(data['caption_words'])}; {distinct:,} captions are distinct"
    if data.get("references"):
        counts = [f"{number} ({count:,})" for number, count in data["references"].items()]
        yield f"references of a clip, with their clips: {', '.join(counts)}"
    if data.get("masked"):
        yield f"{data['masked']:,} have a mask: what it leaves out counts {_floor(contents):g} times in the loss"
    if data.get("classes"):
        yield f"{data['classes']:,} classes"
    for name in data["datasets"]:
        yield f"dataset: [{plain(name)}](https://huggingface.co/datasets/{name})"
    if data["left_out"]:
        yield f"{data['left_out']:,} samples could not be used and were left out before training"


def _floor(contents: Contents) -> float:
    return float(contents.run.config["data"].get("mask_floor", 0.0))


def _about(kind: str) -> str:
    return {"image": "an image", "video": "a video", "text": "text alone"}[kind]


def _spread(values: Mapping[str, float]) -> str:
    if values["least"] == values["most"]:
        return f"{values['least']:g}"
    return f"{values['least']:g} to {values['most']:g}, median {values['median']:g}"
