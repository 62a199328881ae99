"""Write the code that loads a published result and samples from it as the run's validation did; it runs as pasted."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.adapters.kinds import WITHOUT_DIFFUSERS
from dit_lora.config.records import Dtype, checked
from dit_lora.families import get_family
from dit_lora.hub.contents import Contents
from dit_lora.results.experts import pair_file

_LOCAL_BASE = "path/to/base"


def needs_ours(contents: Contents) -> bool:
    """Return whether stock Diffusers cannot load it: no LoRA loader, a class of ours, or classes not in the base."""
    pipeline = contents.facts.get("pipeline")
    if pipeline is None:
        return contents.facts["model"]["module"].startswith("dit_lora.")
    ours = pipeline["module"] != "diffusers"
    if contents.kind == "pipeline":
        return ours
    # The code names another pipeline class over the same files; other changes of model_index.json only we can read.
    changes = {*(contents.made.get("index") or {})} - {"_class_name"}
    return ours or not pipeline["loads_lora"] or bool(changes)


def install_line(contents: Contents) -> str:
    """Return the command that installs what `usage_code` needs."""
    if needs_ours(contents):
        packages = ["dit-lora"]
    elif "pipeline" in contents.facts:
        packages = ["torch", "diffusers", "transformers", "peft", "accelerate", "sentencepiece"]
    else:
        packages = ["torch", "transformers", "peft", "accelerate"]
    if "pipeline" in contents.facts:
        packages += get_family(contents.made["family"]).pipeline_packages
    if _is_video(contents):
        packages += ["imageio", "imageio-ffmpeg"]
    return f"pip install {' '.join(packages)}"


def usage_code(contents: Contents, repo_id: str, prompt: str) -> str:
    """Return Python source; `repo_id` is where the result is on the Hub."""
    is_pipeline = "pipeline" in contents.facts
    name = "use_pipeline.jinja" if is_pipeline else "use_chat.jinja"
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = resources.files("dit_lora.hub").joinpath(name).read_text(encoding="utf-8")
    code = environment.from_string(template).render(
        facts={"to_image": False, **contents.facts["pipeline" if is_pipeline else "model"]},
        references=reference_files(contents.facts.get("pipeline", {})),
        clips=contents.facts.get("pipeline", {}).get("reference_clips", False),
        repo_id=repo_id,
        prompt=prompt,
        base=_base(contents),
        on_hub=contents.base is not None,
        base_weights=BASE_FILE if BASE_FILE in contents.files else None,
        has_adapter="adapter_config.json" in contents.files,
        loading=_loading(contents, repo_id) if is_pipeline else (),
        in_peft_format=_kind(contents) in WITHOUT_DIFFUSERS,
        is_whole=contents.kind == "pipeline",
        is_video=_is_video(contents),
        ours=needs_ours(contents),
        dtype=_dtype(contents)
        if is_pipeline
        else checked(contents.made.get("dtype"), Dtype, "the dtype of the result's header"),
        literal=literal,
        repr=repr,
    )
    return code.rstrip()


def reference_files(pipeline: Mapping[str, Any]) -> list[str]:
    """Return the names that code and commands give to a pipeline's references."""
    suffix = "mp4" if pipeline.get("reference_clips") else "png"
    return [f"reference_{place}.{suffix}" for place in range(1, pipeline.get("references", 0) + 1)]


def literal(text: str) -> str:
    """Return the text as a Python string in double quotes, on one line."""
    return json.dumps(text, ensure_ascii=False)


def _kind(contents: Contents) -> str:
    """Return the adapter's kind; headers from before there were kinds are of LoRAs."""
    return str(contents.made.get("kind", "lora"))


def _loading(contents: Contents, repo_id: str) -> list[str]:
    """Return the lines that load the adapter, of two experts each one's; none for a whole pipeline."""
    if contents.kind == "pipeline":
        return []
    if needs_ours(contents):
        return [f"dit_lora.load_adapter(pipe, {literal(repo_id)})"]
    return [_load_line(one, repo_id) for one in contents.experts or (contents,)]


def _load_line(contents: Contents, repo_id: str) -> str:
    """Return how Diffusers, or PEFT for a kind that Diffusers does not read, loads one adapter."""
    part = contents.made.get("part", "transformer")
    if _kind(contents) in WITHOUT_DIFFUSERS:
        return f"PeftModel.from_pretrained(pipe.{part}, {literal(repo_id)})"
    name = pair_file(contents.expert) if contents.expert else ADAPTER_FILE
    if _kind(contents) == "lokr":
        # Few pipelines take one by `load_lora_weights`.
        where = f'weight_name={literal(name)}, prefix="transformer"'
        return f"pipe.{part}.load_lora_adapter({literal(repo_id)}, {where})"
    arguments = [literal(repo_id)]
    arguments += [f"weight_name={literal(name)}"] if contents.expert else []
    arguments += ["load_into_transformer_2=True"] if part == "transformer_2" else []
    return f"pipe.load_lora_weights({', '.join(arguments)})"


def _is_video(contents: Contents) -> bool:
    pipeline = contents.facts.get("pipeline") or {}
    return pipeline.get("output") == "frames" and bool(pipeline["fps"])


def _base(contents: Contents) -> str:
    """Return the arguments that load the base; where it was a folder, a place of the reader's."""
    if contents.base is None:
        return literal(_LOCAL_BASE)
    base, revision = literal(contents.base), contents.made.get("revision")
    return f"{base}, revision={literal(revision)}" if revision else base


def _dtype(contents: Contents) -> str:
    dtype, wide = str(contents.facts["pipeline"]["dtype"]), contents.facts["pipeline"]["in_fp32"]
    if not wide or dtype == "torch.float32":
        return dtype
    components = "".join(f'"{name}": torch.float32, ' for name in wide)
    return f'{{{components}"default": {dtype}}}'


def sample_line(contents: Contents, repo_id: str, prompt: str) -> Sequence[str]:
    """Return the command that does the same by `dit-lora sample`; none for a chat model, which answers."""
    if "pipeline" not in contents.facts:
        return ()
    quoted = "'" + prompt.replace("'", "'\\''") + "'"
    model = "" if contents.base or contents.kind == "pipeline" else f" --model {_LOCAL_BASE}"
    given = reference_files(contents.facts["pipeline"])
    references = "".join(f" --reference {file}" for file in given)
    return (f"dit-lora sample {repo_id}{model} --prompt {quoted}{references}",)
