"""Write the code that loads a published result and samples from it as the run's validation did; it runs as pasted."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.families import get_family
from dit_lora.hub.contents import Contents

_LOCAL_BASE = "path/to/base"


def needs_ours(contents: Contents) -> bool:
    """Return whether stock Diffusers cannot load it: no LoRA loader, a class of ours, or classes that the base has not."""
    pipeline = contents.facts.get("pipeline")
    if pipeline is None:
        return contents.facts["model"]["module"].startswith("dit_lora.")
    ours = pipeline["module"] != "diffusers"
    if contents.kind == "pipeline":
        return ours
    return ours or not pipeline["loads_lora"] or bool(contents.made.get("index"))


def install_line(contents: Contents) -> str:
    """Return the command that installs what `usage_code` needs."""
    if needs_ours(contents):
        packages = ["dit-lora"]
    elif "pipeline" in contents.facts:
        packages = ["torch", "diffusers", "transformers", "peft", "accelerate", "sentencepiece"]
    else:
        packages = ["torch", "transformers", "peft", "accelerate"]
    if _is_video(contents):
        packages += ["imageio", "imageio-ffmpeg"]
    return f"pip install {' '.join(packages)}"


def usage_code(contents: Contents, repo_id: str, prompt: str) -> str:
    """Return Python source; `repo_id` is where the result is on the Hub."""
    if "pipeline" in contents.facts:
        return "\n".join(_diffusion(contents, repo_id, prompt))
    return "\n".join(_chat(contents, repo_id))


def literal(text: str) -> str:
    """Return the text as a Python string in double quotes, on one line."""
    return json.dumps(text, ensure_ascii=False)


def _is_video(contents: Contents) -> bool:
    return contents.facts.get("pipeline", {}).get("output") == "frames" and bool(
        contents.facts["pipeline"]["fps"]
    )


def _diffusion(contents: Contents, repo_id: str, prompt: str) -> list[str]:
    facts = contents.facts["pipeline"]
    name, whole, ours = facts["class"], contents.kind == "pipeline", needs_ours(contents)
    base_weights = BASE_FILE in contents.files and not ours
    source = literal(repo_id) if whole else _base(contents)
    # In a repository Diffusers looks for our classes among its own; in a folder it imports them.
    fetched = facts["module"] != "diffusers" and (whole or contents.base is not None)
    if fetched:
        source = f"snapshot_download({source})"
    lines = ["import torch", f"from {facts['module']} import {name}"]
    helpers = ["export_to_video"] if _is_video(contents) else []
    helpers += ["load_image"] if facts["from_image"] else []
    if helpers:
        lines.append(f"from diffusers.utils import {', '.join(sorted(helpers))}")
    if fetched:
        lines.append("from huggingface_hub import snapshot_download")
    if base_weights:
        lines += [
            "from huggingface_hub import hf_hub_download",
            "from safetensors.torch import load_file",
        ]
    if ours and not whole:
        lines += ["", "import dit_lora"]
    lines += [
        "",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f"pipe = {name}.from_pretrained({source}, dtype={_dtype(contents)})",
    ]
    if base_weights:
        lines += [
            f'weights = load_file(hf_hub_download("{repo_id}", "{BASE_FILE}"))',
            "pipe.transformer.load_state_dict(weights, strict=False)  # before the adapter",
        ]
    if ours and not whole:
        lines.append(f'dit_lora.load_adapter(pipe, "{repo_id}")')
    elif not whole:
        lines.append(f'pipe.load_lora_weights("{repo_id}")')
    return [*lines, "pipe.to(device)", "", *_call(facts, prompt, _is_video(contents))]


def _call(facts: Mapping[str, Any], prompt: str, video: bool) -> list[str]:
    arguments = [f"prompt={literal(prompt)},"]
    if facts["condition"] == "class_labels":
        rows = f"torch.tensor({facts['label']})" if facts["labels_as_tensor"] else facts["label"]
        arguments = [f"class_labels={rows},"]
    if facts["from_image"]:
        arguments.append('image=load_image("first_frame.png"),')
    arguments += [f"{key}={value!r}," for key, value in facts["arguments"].items()]
    arguments.append(f'generator=torch.Generator("cpu").manual_seed({facts["seed"]}),')
    lines = ["result = pipe(", *(f"    {one}" for one in arguments), ")"]
    if video:
        fps = f"{facts['fps']:g}"
        return [*lines, f'export_to_video(result.frames[0], "sample.mp4", fps={fps})']
    return [*lines, f'result.{facts["output"]}[0].save("sample.png")']


def _chat(contents: Contents, repo_id: str) -> list[str]:
    model = contents.facts["model"]
    ours = model["library"] == "dit_lora"
    name = model["class"] if ours else "AutoModelForImageTextToText"
    has_adapter = "adapter_config.json" in contents.files
    base_weights = BASE_FILE in contents.files
    lines = ["import torch"]
    if base_weights:
        lines.append("from huggingface_hub import hf_hub_download")
    if has_adapter:
        lines.append("from peft import PeftModel")
    if base_weights:
        lines.append("from safetensors.torch import load_file")
    lines.append("" if ours else f"from transformers import {name}")
    if ours:
        lines.append(f"from {model['module']} import {name}")
    lines += [
        "",
        f"model = {name}.from_pretrained({_base(contents)}, dtype={contents.made['dtype']})",
    ]
    if base_weights:
        lines += [
            f'weights = load_file(hf_hub_download("{repo_id}", "{BASE_FILE}"))',
            "model.load_state_dict(weights, strict=False)  # before the adapter",
        ]
    if has_adapter:
        lines.append(f'model = PeftModel.from_pretrained(model, "{repo_id}")')
    return [*lines, "model.eval()"]


def _base(contents: Contents) -> str:
    """Return the arguments that load the base; where it was a folder, a place of the reader's."""
    if contents.base is None:
        return literal(_LOCAL_BASE)
    base, revision = literal(contents.base), contents.made.get("revision")
    return f"{base}, revision={literal(revision)}" if revision else base


def _dtype(contents: Contents) -> str:
    dtype = str(contents.facts["pipeline"]["dtype"])
    if get_family(contents.made["family"]).fp32_vae and dtype != "torch.float32":
        return f'{{"vae": torch.float32, "default": {dtype}}}'
    return dtype


def sample_line(contents: Contents, repo_id: str, prompt: str) -> Sequence[str]:
    """Return the command that does the same by `dit-lora sample`; none for a chat model, which answers."""
    if "pipeline" not in contents.facts:
        return ()
    quoted = "'" + prompt.replace("'", "'\\''") + "'"
    model = "" if contents.base or contents.kind == "pipeline" else f" --model {_LOCAL_BASE}"
    return (f"dit-lora sample {repo_id}{model} --prompt {quoted}",)
