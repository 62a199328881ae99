"""VideoChat2 computes the values and gradients of the original, independent of the rest of the batch."""

import pytest
import torch
from videochat2_reference import (
    BOS,
    MEDIA,
    TILE,
    double,
    positions,
    reference_logits,
    rows,
    tiny_batch,
    tiny_config,
    tiny_model,
)

from dit_lora.errors import DitLoraError
from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration
from dit_lora.models.videochat2.vision import build_position_table

# fp32 against fp64, logits of about 1.4; every mutant is off by more than 1e-3
TOLERANCE = 1e-5


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("use_text", [False, True])
@pytest.mark.parametrize(
    ("language", "frames", "height", "width"),
    [
        ("mistral", 3, TILE, TILE),
        ("mistral", 1, TILE, TILE),
        ("mistral", 2, TILE, TILE),
        ("mistral", 3, 2 * TILE, 3 * TILE),
        ("mistral", 1, TILE, 2 * TILE),
        ("phi3", 3, 2 * TILE, TILE),
        ("llama", 1, TILE, TILE),
    ],
)
def test_logits_are_those_of_the_published_architecture(
    language: str, frames: int, height: int, width: int, use_text: bool, legacy: bool
) -> None:
    config = tiny_config(language, legacy=legacy, qformer_config={"use_text": use_text})
    model = tiny_model(config)
    batch = tiny_batch(config, frames, height, width)
    logits, state = model(**batch).logits, double(model)
    for row, ours in zip(rows(batch), logits, strict=True):
        theirs = reference_logits(state, config, row)
        assert (ours[: len(theirs)] - theirs).abs().max() < TOLERANCE


def test_gradients_are_those_of_the_published_architecture() -> None:
    """Of every parameter, with tiles and text; those that cannot have one are named."""
    config = tiny_config()
    model = tiny_model(config)
    batch = tiny_batch(config, 3, TILE, 2 * TILE)
    logits, state = model(**batch).logits, double(model)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    weight[0, -3:] = 0  # padding
    (logits * weight).sum().backward()
    for row, weights in zip(rows(batch), weight, strict=True):
        theirs = reference_logits(state, config, row)
        (theirs * weights[: len(theirs)]).sum().backward()
    for name, parameter in model.named_parameters():
        expected = state[name].grad
        assert parameter.grad is not None, name
        if name.startswith("model.qformer.encoder.layer.2.") and name.split(".")[5] in (
            "intermediate",
            "output",
        ):
            assert not parameter.grad.any(), name  # words after the last layer are not read
            continue
        assert expected is not None, name
        if name.endswith("self.key.bias"):  # a shift of all scores of a query changes no softmax
            assert parameter.grad.abs().max() < 1e-4, name
            continue
        assert expected.norm() > 1e-3, name
        assert (parameter.grad - expected).norm() < 1e-4 * expected.norm(), name


def test_without_text_the_qformer_has_no_words() -> None:
    """Neither embeddings nor the words' feed-forward, in any layer; all else stays."""
    with_text = set(tiny_model(tiny_config()).model.qformer.state_dict())
    names_without_text = set(tiny_model(tiny_config(qformer_config={"use_text": False})).model.qformer.state_dict())
    assert names_without_text < with_text
    feed_forward = {
        f"encoder.layer.{layer}.{name}.{kind}"
        for layer in range(3)
        for name in ("intermediate.dense", "output.dense", "output.LayerNorm")
        for kind in ("weight", "bias")
    }
    embeddings = {f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position")}
    assert with_text - names_without_text == feed_forward | embeddings


def test_batch_neighbours_and_padding_change_nothing() -> None:
    """A single row without padding gives the same logits as in the batch."""
    config = tiny_config()
    model = tiny_model(config)
    batch = tiny_batch(config)
    logits = model(**batch).logits
    for row, ours in zip(rows(batch), logits, strict=True):
        unbatched = model(**{name: value[None] for name, value in row.items()}).logits[0]
        torch.testing.assert_close(ours[: len(unbatched)], unbatched, atol=TOLERANCE, rtol=0)


def test_generate_with_a_cache_is_step_by_step_argmax() -> None:
    """Rows of different lengths padded on the left, media at different places, legacy BOS at the row's start."""
    config = tiny_config(legacy=True)
    model = tiny_model(config)
    model.generation_config.eos_token_id = None
    batch = tiny_batch(config, 3, TILE, 2 * TILE)
    padded = batch["input_ids"].clone()
    padded[0] = padded[0].roll(3)  # its three pads to the left
    mask = (padded != 0).long()
    expected = []
    for row in rows(batch):
        inputs = {name: value[None] for name, value in row.items()}
        for _ in range(6):
            token = model(**inputs).logits[:, -1:].argmax(-1)
            inputs["input_ids"] = torch.cat([inputs["input_ids"], token], 1)
        expected.append(inputs["input_ids"][0, -6:])
    inputs = batch | {"input_ids": padded, "attention_mask": mask}
    for use_cache in (True, False):
        actual = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        assert torch.equal(actual[:, -6:], torch.stack(expected))
    assert len(torch.stack(expected).unique()) > 3


def test_generate_reads_the_media_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    model = tiny_model(config)
    calls = []
    read = model.model.get_media_features
    monkeypatch.setattr(model.model, "get_media_features", lambda *args: calls.append(1) or read(*args))
    batch = tiny_batch(config)
    inputs = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    model.generation_config.eos_token_id = None
    model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert len(calls) == 1


def test_labels_give_the_mean_next_token_loss() -> None:
    config = tiny_config()
    model = tiny_model(config)
    batch = tiny_batch(config)
    labels = batch["input_ids"].where(batch["input_ids"] != MEDIA, -100)
    output = model(**batch, labels=labels)
    log_probabilities = output.logits[:, :-1].double().log_softmax(-1)
    has_label = labels[:, 1:] != -100
    picked = log_probabilities.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0][has_label]
    torch.testing.assert_close(output.loss.double(), -picked.mean(), atol=1e-6, rtol=0)
    last_logits = model(**batch, logits_to_keep=2).logits
    torch.testing.assert_close(last_logits, output.logits[:, -2:])


def test_text_alone_needs_no_pixels() -> None:
    config = tiny_config()
    model = tiny_model(config)
    ids = torch.tensor([[BOS, 9, 8, 7], [BOS, 5, 6, 11]])
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(input_ids=ids).logits, model(inputs_embeds=embedded).logits, atol=0, rtol=0)


@pytest.mark.parametrize(("legacy", "eps"), [(True, 1e-12), (False, 1e-6)])
def test_legacy_is_the_eps_of_every_norm_outside_the_vision_blocks(legacy: bool, eps: float) -> None:
    model = tiny_model(tiny_config(legacy=legacy)).model
    norms = {name: m.eps for name, m in model.named_modules() if isinstance(m, torch.nn.LayerNorm)}
    blocks = {name for name in norms if name.startswith("vision_encoder.encoder.blocks.")}
    assert (len(blocks), len(norms)) == (6, 6 + 1 + 1 + 3 * 3 + 2)
    assert all(value == (1e-6 if name in blocks else eps) for name, value in norms.items())


@pytest.mark.parametrize(("frames", "pretrained"), [(1, 1), (4, 4), (8, 4), (3, 2), (2, 5)])
def test_position_table_is_the_pretrained_one_stretched_in_time(frames: int, pretrained: int) -> None:
    table = build_position_table(20, 3, frames, pretrained, torch.device("cpu"))
    expected = positions(frames, pretrained, 9, 20).flatten(0, 1)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table.double(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(("side", "frames"), [(24, 8), (10, 1), (14, 4)])
def test_position_table_of_another_size_is_the_pretrained_one_resized(side: int, frames: int) -> None:
    device = torch.device("cpu")
    pretrained = 1 if frames == 1 else 4
    table = build_position_table(20, side, frames, pretrained, device, pretrained_side=14)
    expected = positions(frames, pretrained, side * side, 20, 14).flatten(0, 1)
    torch.testing.assert_close(table.double(), expected, atol=2e-6, rtol=0)
    resized = build_position_table(20, side, frames, pretrained, device)
    assert torch.equal(resized, table) is (side == 14)


def test_media_tokens_are_counted_by_the_configuration() -> None:
    """A tile, or tiles and the whole; each gives every query."""
    config = VideoChat2Config()
    assert config.num_media_tokens(224, 224) == 96
    assert config.num_media_tokens(448, 672) == 7 * 96
    assert VideoChat2Config(add_global=False).num_media_tokens(448, 672) == 6 * 96
    for height, width in ((224, 300), (112, 224), (0, 224)):
        with pytest.raises(DitLoraError, match=f"whole tiles of 224x224.*got {height}x{width}"):
            config.num_media_tokens(height, width)


def test_wrong_media_counts_are_refused_row_by_row() -> None:
    config = tiny_config()
    model = tiny_model(config)
    batch = tiny_batch(config)
    batch["input_ids"][1, 6] = 9
    with pytest.raises(DitLoraError, match=r"needs 5 media tokens \(id 77\)[^0]*- row 1: 4$"):
        model(**batch)
    with pytest.raises(DitLoraError, match=r"needs 0 media tokens[\s\S]*row 0: 5\n  - row 1: 4"):
        model(input_ids=batch["input_ids"])


def test_inputs_that_the_model_cannot_read_are_refused() -> None:
    config = tiny_config(qformer_config={"use_text": False})
    model = tiny_model(config)
    batch = tiny_batch(config)
    with pytest.raises(DitLoraError, match=r"use_text: false\); got instruction_ids of shape"):
        model(**batch, instruction_ids=torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(DitLoraError, match="either input_ids or inputs_embeds; got neither"):
        model(pixel_values=batch["pixel_values"])
    with pytest.raises(DitLoraError, match=f"frames of 3x{TILE}x{TILE}.*got 3 of 1x{TILE}x{TILE}"):
        model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"][:, :, :1])


def test_a_configuration_that_cannot_be_built_is_refused_whole() -> None:
    with pytest.raises(DitLoraError, match=r"prompt_format[\s\S]*media_token_id[\s\S]*tile_size"):
        VideoChat2Config(prompt_format="qwen", media_token_id=5, tile_size=100)
    with pytest.raises(DitLoraError, match=r"no such keys[\s\S]*depth\n  - width"):
        VideoChat2Config(vision_config={"width": 3, "depth": 2})
    with pytest.raises(DitLoraError, match="no single bos_token_id; got None"):
        VideoChat2Config(text_config={"bos_token_id": None}, legacy=True)


def test_model_is_built_without_memory_on_meta() -> None:
    with torch.device("meta"):
        model = VideoChat2ForConditionalGeneration(tiny_config())
    assert all(parameter.is_meta for parameter in model.parameters())
