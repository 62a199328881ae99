"""Tiny VideoChat2 models with random, non-neutral weights, and what the original computes from such weights.

The reference is written from the published architecture, one sample at a time, over a state dict in fp64: no batch,
no mask, no padding, no code of the model under test.
"""

import math
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration

State = dict[str, torch.Tensor]

TILE, MEDIA, BOS, PAD = 12, 77, 3, 0  # the media's id is outside the vocabulary
TEXT = {
    "vocab_size": 71,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": BOS,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}
VISION = {
    "image_size": TILE,
    "patch_size": 4,
    "hidden_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "mlp_ratio": 2.5,
    "num_frames": 3,
    "pretrained_frames": 2,
}
QFORMER = {
    "hidden_size": 18,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 27,
    "vocab_size": 37,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}


def tiny_config(language: str = "mistral", **changes: Any) -> VideoChat2Config:
    """Three frames interpolated from two, no dropout; changes to a part are merged into it."""
    return VideoChat2Config(
        vision_config=VISION | changes.pop("vision_config", {}),
        qformer_config=QFORMER | changes.pop("qformer_config", {}),
        text_config={"model_type": language, **TEXT, **changes.pop("text_config", {})},
        **({"num_query_tokens": 3, "num_extra_query_tokens": 2, "media_token_id": MEDIA} | changes),
        tile_size=TILE,
    )


def tiny_model(config: VideoChat2Config) -> VideoChat2ForConditionalGeneration:
    """No weight is neutral: norms are not 1, biases and queries are not 0."""
    generator = torch.Generator().manual_seed(0)
    model = VideoChat2ForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.data = 1 + 0.3 * noise if is_norm else 0.25 * noise
    return model


def tiny_batch(
    config: VideoChat2Config, frames: int = 3, height: int = TILE, width: int = TILE
) -> dict[str, torch.Tensor]:
    """Two different rows: media at another place, 3 pads on the right of the first, 2 of its instruction."""
    generator = torch.Generator().manual_seed(1)
    count = config.num_media_tokens(height, width)
    ids = torch.randint(4, TEXT["vocab_size"], (2, count + 9), generator=generator)
    ids[:, 0] = BOS
    ids[0, 2 : 2 + count], ids[1, 5 : 5 + count] = MEDIA, MEDIA
    ids[0, -3:] = PAD
    batch = {
        "input_ids": ids,
        "pixel_values": torch.randn((2, frames, 3, height, width), generator=generator),
    }
    if config.qformer_config["use_text"]:
        batch["instruction_ids"] = torch.randint(1, 37, (2, 7), generator=generator)
        batch["instruction_mask"] = torch.ones(2, 7, dtype=torch.long)
        batch["instruction_mask"][0, -2:] = 0
    return batch


def rows(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each sample alone, without its padding."""
    row_batches = []
    for index, ids in enumerate(batch["input_ids"]):
        row = {"input_ids": ids[ids != PAD], "pixel_values": batch["pixel_values"][index]}
        if "instruction_ids" in batch:
            is_kept = batch["instruction_mask"][index].bool()
            row["instruction_ids"] = batch["instruction_ids"][index][is_kept]
        row_batches.append(row)
    return row_batches


def double(model: VideoChat2ForConditionalGeneration) -> State:
    """The weights in fp64, as leaves."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in model.state_dict().items()}


def reference_logits(state: State, config: VideoChat2Config, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits (L, vocabulary) of one sample, fp64."""
    ids = row["input_ids"]
    features = media_tokens(state, config, row["pixel_values"].double(), row.get("instruction_ids"))
    embeddings = state["model.language_model.embed_tokens.weight"]
    vectors, used = [], 0
    for position, token in enumerate(ids.tolist()):
        if token == MEDIA:
            vectors.append(features[used])
            used += 1
        elif position == 0 and config.legacy:
            vectors.append(torch.full_like(embeddings[0], BOS))
        else:
            vectors.append(embeddings[token])
    assert used == len(features)
    embedded = torch.stack(vectors)
    if config.text_config.model_type == "mistral":
        return mistral(state, config, embedded)
    return library_language_model(state, config, embedded)


def part(state: State, prefix: str) -> State:
    """What is below `prefix`, without it."""
    return {name[len(prefix) + 1 :]: value for name, value in state.items() if name.startswith(prefix + ".")}


def linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def norm(state: State, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / (variance + eps).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, causal: bool = False
) -> torch.Tensor:
    """(tokens, width) of one sample; softmax(q k / sqrt(head width)) v, head after head."""
    outputs = []
    parts = (x.chunk(heads, -1) for x in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        scores = q @ k.T / math.sqrt(q.shape[-1])
        if causal:
            is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(is_later, -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, -1)


def media_tokens(
    state: State,
    config: VideoChat2Config,
    pixels: torch.Tensor,
    instruction: torch.Tensor | None,
) -> torch.Tensor:
    """Tiles row after row, then the whole picture; the tokens of each, one after the other."""
    height, width = pixels.shape[-2:]
    views = [
        pixels[..., top : top + TILE, column : column + TILE]
        for top in range(0, height, TILE)
        for column in range(0, width, TILE)
    ]
    if len(views) > 1 and config.add_global:
        views.append(functional.interpolate(pixels, (TILE, TILE), mode="bicubic", align_corners=False))
    eps = 1e-12 if config.legacy else 1e-6
    trunk = part(state, "model")
    outputs = []
    for view in views:
        features = vision(part(trunk, "vision_encoder.encoder"), config.vision_config, view)
        features = norm(trunk, "vision_layernorm", features, eps)
        queries = torch.cat([trunk["query_tokens"][0], trunk["extra_query_tokens"][0]])
        sizes = config.qformer_config
        read = qformer(part(trunk, "qformer"), sizes, queries, features, instruction, eps)
        outputs.append(linear(trunk, "projection", read))
    return torch.cat(outputs)


def sinusoids(count: int, width: int) -> torch.Tensor:
    table = torch.empty(count, width, dtype=torch.float64)
    for position in range(count):
        for channel in range(width):
            angle = position / 10000 ** (2 * (channel // 2) / width)
            table[position, channel] = math.cos(angle) if channel % 2 else math.sin(angle)
    return table


def positions(frames: int, pretrained: int, patches: int, width: int, side: int | None = None) -> torch.Tensor:
    """(frames, patches, width): of one frame its own table, else that of `pretrained` frames stretched in time.

    With `side`, the tables are of side x side patches, resized to `patches` of them before.
    """
    pretrained = 1 if frames == 1 else pretrained
    pretrained_patches = side * side if side else patches
    table = sinusoids(pretrained * pretrained_patches, width).view(pretrained, pretrained_patches, width)
    if side:
        pictures = table.mT.unflatten(2, (side, side))
        table = functional.interpolate(pictures, size=(int(patches**0.5),) * 2, mode="bicubic")
        table = table.flatten(2).mT
    stretched = []
    for frame in range(frames):
        table_position = (frame + 0.5) * pretrained / frames - 0.5
        table_position = min(max(table_position, 0.0), pretrained - 1.0)
        low = int(table_position)
        high = min(low + 1, pretrained - 1)
        stretched.append(table[low] * (1 - (table_position - low)) + table[high] * (table_position - low))
    return torch.stack(stretched)


def vision(state: State, sizes: dict[str, Any], pixels: torch.Tensor) -> torch.Tensor:
    """(F, 3, H, W) to the output of the last block but one, (F * patches, width)."""
    size, width, heads = sizes["patch_size"], sizes["hidden_size"], sizes["num_attention_heads"]
    kernel = state["patch_embed.proj.weight"].reshape(width, -1)
    frames = []
    for frame in pixels:
        patches = functional.unfold(frame[None], size, stride=size)[0].T
        frames.append(patches @ kernel.T + state["patch_embed.proj.bias"])
    x = torch.stack(frames)
    # vit.py: of pictures that are not 224 pixels high, the table of 14 x 14 patches, resized.
    table = positions(len(pixels), sizes["pretrained_frames"], x.shape[1], width, 14)
    x = (x + table).flatten(0, 1)
    for index in range(sizes["num_hidden_layers"] - 1):
        block = part(state, f"blocks.{index}")
        query, key, value = linear(block, "attn.qkv", norm(block, "norm1", x, 1e-6)).chunk(3, -1)
        query, value = query + block["attn.q_bias"], value + block["attn.v_bias"]
        x = x + linear(block, "attn.proj", attend(query, key, value, heads))
        hidden = gelu(linear(block, "mlp.fc1", norm(block, "norm2", x, 1e-6)))
        x = x + linear(block, "mlp.fc2", hidden)
    return x


def qformer(
    state: State,
    sizes: dict[str, Any],
    queries: torch.Tensor,
    seen: torch.Tensor,
    instruction: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """BERT, post-norm; queries look at `seen` in every second layer and have a feed-forward of their own."""
    heads, x, count = sizes["num_attention_heads"], queries, len(queries)
    if instruction is not None:
        word_rows = state["embeddings.word_embeddings.weight"][instruction]
        position_rows = state["embeddings.position_embeddings.weight"][: len(instruction)]
        x = torch.cat([queries, word_rows + position_rows])
    x = norm(state, "embeddings.LayerNorm", x, eps)

    def attention(layer: State, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = (linear(layer, f"{name}.self.{kind}", z) for kind, z in (("query", x), ("key", y), ("value", y)))
        mixed = linear(layer, f"{name}.output.dense", attend(*parts, heads))
        return norm(layer, f"{name}.output.LayerNorm", mixed + x, eps)

    def feed_forward(layer: State, suffix: str, x: torch.Tensor) -> torch.Tensor:
        hidden = gelu(linear(layer, f"intermediate{suffix}.dense", x))
        mixed = linear(layer, f"output{suffix}.dense", hidden)
        return norm(layer, f"output{suffix}.LayerNorm", mixed + x, eps)

    for index in range(sizes["num_hidden_layers"]):
        layer = part(state, f"encoder.layer.{index}")
        x = attention(layer, "attention", x, x)
        query, word_rows = x[:count], x[count:]
        if index % 2 == 0:
            query = attention(layer, "crossattention", query, seen)
        query = feed_forward(layer, "_query", query)
        x = torch.cat([query, feed_forward(layer, "", word_rows)]) if len(word_rows) else query
    return x[:count]


def mistral(state: State, config: VideoChat2Config, x: torch.Tensor) -> torch.Tensor:
    """Mistral's decoder (arXiv 2310.06825): RMSNorm, rotary positions, grouped queries, SwiGLU."""
    sizes = config.text_config
    heads, groups = sizes.num_attention_heads, sizes.num_key_value_heads
    language = part(state, "model.language_model")

    def rms(name: str, x: torch.Tensor) -> torch.Tensor:
        size = (x**2).mean(-1, keepdim=True) + sizes.rms_norm_eps
        return x / size.sqrt() * language[f"{name}.weight"]

    def rotate(x: torch.Tensor, heads: int) -> torch.Tensor:
        x = x.unflatten(-1, (heads, -1))
        half = x.shape[-1] // 2
        speed = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = (torch.arange(len(x))[:, None] * speed)[:, None]
        first_half, second = x[..., :half], x[..., half:]
        rotated_halves = first_half * angle.cos() - second * angle.sin()
        return torch.cat([rotated_halves, second * angle.cos() + first_half * angle.sin()], -1).flatten(1)

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1).flatten(1)

    for index in range(sizes.num_hidden_layers):
        name = f"layers.{index}"
        h = rms(f"{name}.input_layernorm", x)
        query = rotate(linear(language, f"{name}.self_attn.q_proj", h), heads)
        key = repeated(rotate(linear(language, f"{name}.self_attn.k_proj", h), groups))
        value = repeated(linear(language, f"{name}.self_attn.v_proj", h))
        mixed = attend(query, key, value, heads, causal=True)
        x = x + linear(language, f"{name}.self_attn.o_proj", mixed)
        h = rms(f"{name}.post_attention_layernorm", x)
        gate = linear(language, f"{name}.mlp.gate_proj", h)
        hidden = gate * torch.sigmoid(gate) * linear(language, f"{name}.mlp.up_proj", h)
        x = x + linear(language, f"{name}.mlp.down_proj", hidden)
    return rms("norm", x) @ state["lm_head.weight"].T


def library_language_model(state: State, config: VideoChat2Config, x: torch.Tensor) -> torch.Tensor:
    """Transformers' own causal LM with the same weights."""
    language = AutoModelForCausalLM.from_config(config.text_config).double().eval()
    weights = {f"model.{name}": value for name, value in part(state, "model.language_model").items()}
    language.load_state_dict(weights | {"lm_head.weight": state["lm_head.weight"]})
    return language(inputs_embeds=x[None]).logits[0]
