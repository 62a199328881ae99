"""VideoChat2's released files, tiny: the original's names and shapes, spelled out from its modules.

Ask-Anything, video_chat2/models/blip2/{vit,Qformer}.py, videochat2_qformer.py (stage 1) and
videochat_*/videochat2_{pt,it}_*.py.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Phi3Config

from dit_lora.families.videochat2.tiny import build_bert_tokenizer, build_llm_tokenizer
from dit_lora.models.videochat2.convert import ConversionReport, convert_videochat2

VISION, BLOCKS, PATCH = 24, 2, 8  # three blocks in the original, of which the last is not read
QFORMER, INNER, QUERIES, EXTRA = 16, 40, 3, 2
TEXT, VOCAB = 32, len(build_llm_tokenizer("mistral"))
CONFIG: dict[str, Any] = {
    "vision_config": {
        "image_size": 16,
        "patch_size": PATCH,
        "hidden_size": VISION,
        "num_hidden_layers": BLOCKS + 1,
        "num_attention_heads": 2,
        "mlp_ratio": 2,
        "num_frames": 2,
        "pretrained_frames": 4,
    },
    "qformer_config": {
        "hidden_size": QFORMER,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": INNER,
        "max_position_embeddings": 20,
    },
    "num_query_tokens": QUERIES,
    "num_extra_query_tokens": EXTRA,
    "tile_size": 16,
}
LLMS: dict[str, Any] = {"mistral": MistralConfig, "llama": LlamaConfig, "phi": Phi3Config}
LAYERS = {  # the layers that get LoRA by the original's target_modules, of those that the model has
    "mistral": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
    ),
    "llama": ("self_attn.q_proj", "self_attn.v_proj"),
    "phi": ("self_attn.o_proj", "mlp.down_proj"),
}
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def vision_shapes(blocks: int) -> Shapes:
    encoder = "vision_encoder.encoder"
    shapes: Shapes = {
        f"{encoder}.patch_embed.proj.weight": (VISION, 3, 1, PATCH, PATCH),
        f"{encoder}.patch_embed.proj.bias": (VISION,),
        **norm("vision_layernorm", VISION),
    }
    for block in (f"{encoder}.blocks.{index}" for index in range(blocks)):
        shapes |= {
            **norm(f"{block}.norm1", VISION),
            f"{block}.attn.q_bias": (VISION,),
            f"{block}.attn.v_bias": (VISION,),
            f"{block}.attn.qkv.weight": (3 * VISION, VISION),
            **linear(f"{block}.attn.proj", VISION, VISION),
            **norm(f"{block}.norm2", VISION),
            **linear(f"{block}.mlp.fc1", VISION, 2 * VISION),
            **linear(f"{block}.mlp.fc2", 2 * VISION, VISION),
        }
    return shapes


def qformer_shapes(text: bool) -> Shapes:
    bert = "qformer.bert"
    shapes: Shapes = {
        "query_tokens": (1, QUERIES, QFORMER),
        f"{bert}.embeddings.position_ids": (1, 20),
        **norm(f"{bert}.embeddings.LayerNorm", QFORMER),
    }
    if text:
        shapes[f"{bert}.embeddings.word_embeddings.weight"] = (len(build_bert_tokenizer()), QFORMER)
        shapes[f"{bert}.embeddings.position_embeddings.weight"] = (20, QFORMER)
    for index in range(2):
        layer = f"{bert}.encoder.layer.{index}"
        attentions = {"attention": QFORMER} | ({"crossattention": VISION} if index == 0 else {})
        for attention, context in attentions.items():
            shapes |= {
                **linear(f"{layer}.{attention}.self.query", QFORMER, QFORMER),
                **linear(f"{layer}.{attention}.self.key", context, QFORMER),
                **linear(f"{layer}.{attention}.self.value", context, QFORMER),
                **linear(f"{layer}.{attention}.output.dense", QFORMER, QFORMER),
                **norm(f"{layer}.{attention}.output.LayerNorm", QFORMER),
            }
        for suffix in ("_query", "") if text else ("_query",):
            shapes |= {
                **linear(f"{layer}.intermediate{suffix}.dense", QFORMER, INNER),
                **linear(f"{layer}.output{suffix}.dense", INNER, QFORMER),
                **norm(f"{layer}.output{suffix}.LayerNorm", QFORMER),
            }
    return shapes


STAGE_1_ONLY: Shapes = {
    "vision_temp_embed": (1, 4, 1, VISION),
    "temp": (),
    **linear("vision_proj", QFORMER, 8),
    **linear("text_proj", QFORMER, 8),
    **linear("itm_head", QFORMER, 2),
    "qformer.cls.predictions.bias": (len(build_bert_tokenizer()),),
    **linear("qformer.cls.predictions.transform.dense", QFORMER, QFORMER),
    **norm("qformer.cls.predictions.transform.LayerNorm", QFORMER),
    "qformer.cls.predictions.decoder.weight": (len(build_bert_tokenizer()), QFORMER),
    "qformer.cls.predictions.decoder.bias": (len(build_bert_tokenizer()),),
}


def drawn(shapes: Shapes, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class World:
    """A language model's folder, the .pth files of three stages, and BERT's tokenizer, all tiny."""

    def __init__(self, folder: Path, llm: str = "mistral", dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.llm = folder, llm
        tokenizer = build_llm_tokenizer("phi3" if llm == "phi" else "mistral")
        tokenizer.save_pretrained(folder / "llm")
        config = LLMS[llm](
            vocab_size=len(tokenizer),
            hidden_size=TEXT,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4 if llm == "phi" else 2,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.2,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
        self.base: Tensors = {name: t.clone() for name, t in model.state_dict().items()}
        config.save_pretrained(folder / "llm")
        save_file(self.base, folder / "llm" / "model.safetensors", metadata={"format": "pt"})
        build_bert_tokenizer().save_pretrained(folder / "bert")
        projection = linear(f"{llm}_proj", QFORMER, TEXT)
        extra: Shapes = {"extra_query_tokens": (1, EXTRA, QFORMER)}
        self.stage1 = drawn(vision_shapes(BLOCKS + 1) | qformer_shapes(text=True) | STAGE_1_ONLY, 1)
        self.stage2 = drawn(vision_shapes(BLOCKS) | qformer_shapes(text=False) | projection | extra, 2)
        self.stage3 = drawn(
            vision_shapes(BLOCKS) | qformer_shapes(text=True) | projection | extra | self.lora_shapes(),
            3,
        )

    def lora_shapes(self) -> Shapes:
        modules = [f"model.layers.{i}.{layer}" for i in range(2) for layer in LAYERS[self.llm]]
        if self.llm != "llama":
            modules.append("lm_head")
        shapes: Shapes = {}
        for module in modules:
            outputs, inputs = self.base[f"{module}.weight"].shape
            before = f"{self.llm}_model.base_model.model.{module}"
            shapes[f"{before}.lora_A.default.weight"] = (4, inputs)
            shapes[f"{before}.lora_B.default.weight"] = (outputs, 4)
        return shapes

    def write(self) -> None:
        """The files as torch saves them; stage 1 is bare, as released, and stage 3 as its run leaves it."""
        torch.save(self.stage1, self.folder / "umt_l16_qformer.pth")
        torch.save(self.stage2, self.folder / "stage2.pth")
        torch.save({"model": self.stage3, "epoch": 2, "scaler": {}}, self.folder / "stage3.pth")

    def convert(self, **changes: Any) -> ConversionReport:
        arguments: dict[str, Any] = {
            "llm": self.folder / "llm",
            "vision": self.folder / "umt_l16_qformer.pth",
            "stages": [self.folder / "stage2.pth", self.folder / "stage3.pth"],
            "qformer_tokenizer": self.folder / "bert",
            "lora_alpha": 8.0,  # as 32 is to the released rank 16
            "config": CONFIG,
        }
        return convert_videochat2(self.folder / "out", **{**arguments, **changes})

    def expected(self, *stages: Tensors) -> Tensors:
        """Our tensors of these files, by hand."""
        ours = {
            (f"model.language_{name}" if name.startswith("model.") else name): tensor
            for name, tensor in self.base.items()
        }
        ours = {name.replace("language_model.", "language_model.", 1): t for name, t in ours.items()}
        for stage in stages:
            for name, tensor in stage.items():
                unused = name in STAGE_1_ONLY or "position_ids" in name or f"blocks.{BLOCKS}." in name
                if unused or ".lora_" in name:
                    continue
                name = name.replace("qformer.bert.", "qformer.").replace(f"{self.llm}_proj", "projection")
                ours[f"model.{name}"] = tensor
        return ours
