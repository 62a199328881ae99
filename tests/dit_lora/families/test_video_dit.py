"""The video DiT and Latte: losses against fp64, classes of the data, UCF101's folders, text masks, what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from dit_lora.config.data import VideoShape
from dit_lora.config.load import parse_recipe
from dit_lora.config.recipe import DataConfig, ModelConfig, Recipe
from dit_lora.data.cache.cache import TensorCache
from dit_lora.data.sources.scan import read_clips
from dit_lora.data.synthetic.clips import write_class_folders
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampling
from dit_lora.families.video_dit.tiny import CLASSES
from dit_lora.numerics.streams import RandomStreams, draw_integers, draw_normal_noise

CPU = torch.device("cpu")
VARIANTS = {"video-dit-class": "video_dit", "video-dit-text": "video_dit", "latte": "latte"}
Tiny = dict[str, Path]
Values = dict[str, Any]


def opened(tiny: Tiny, variant: str, **model: Any) -> Any:
    family = VARIANTS[variant]
    return get_family(family).open(ModelConfig(family=family, path=str(tiny[variant]), **model))


def batch_of(checkpoint: Any, captions: list[str], frames: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, len(captions), 4, frames, 4, 4, generator=generator)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    rows = [{name: tensor[0] for name, tensor in encode([text]).items()} for text in captions]
    text = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"latent_mean": 4 * latents[0], "latent_logvar": latents[1] - 3, **text}


def test_losses_are_the_noise_and_the_bound_of_the_variance(tiny_checkpoints: Tiny) -> None:
    """Recomputed in fp64 from the linear schedule, the streams' draws and the network's output; t = 0 aside."""
    for variant in VARIANTS:
        checkpoint = opened(tiny_checkpoints, variant)
        batch = batch_of(checkpoint, [CLASSES[4], "", CLASSES[1]])
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        streams = RandomStreams(7, [11, 12, 13])
        output = checkpoint.denoiser.losses(transformer, batch, streams)
        t = draw_integers(0, 1000, streams("timestep"))
        assert torch.equal(output.timesteps, t)
        assert t.min() > 0
        beta = torch.linspace(1e-4, 0.02, 1000).double()
        total = (1 - beta).cumprod(0)
        at, before = (x.view(-1, 1, 1, 1, 1) for x in (total[t], total[t - 1]))
        size = batch["latent_mean"].shape[1:]
        mean, logvar = batch["latent_mean"].double(), batch["latent_logvar"].double()
        clean = 0.18215 * (mean + (logvar / 2).exp() * draw_normal_noise(size, streams("posterior")))
        noise = draw_normal_noise(size, streams("noise")).double()
        noisy = at.sqrt() * clean + (1 - at).sqrt() * noise
        with torch.no_grad():
            network = checkpoint.denoiser.predict(transformer, noisy.float(), t, batch).double()
        error = (network[:, :4] - noise).square().flatten(1).mean(1)

        step = beta[t].view_as(at)
        share = (network[:, 4:] + 1) / 2
        low = (step * (1 - before) / (1 - at)).log()
        log_variance = share * step.log() + (1 - share) * low
        guess = (noisy - (1 - at).sqrt() * network[:, :4]) / at.sqrt()
        off = before.sqrt() * step / (1 - at) * (guess - clean)
        bound = 0.5 * (log_variance - low - 1 + (low - log_variance).exp() + off.square() * (-log_variance).exp())
        expected = error + bound.flatten(1).mean(1) / math.log(2)
        torch.testing.assert_close(output.losses.double(), expected, rtol=1e-4, atol=0)
        assert bound.abs().max() > 1e-3
        plain = replace(checkpoint.denoiser, should_train_variance=False)
        losses = plain.losses(transformer, batch, streams).losses
        torch.testing.assert_close(losses.double(), error, rtol=1e-5, atol=0)


def test_captions_become_labels_and_the_empty_one_the_null_class(tiny_checkpoints: Tiny) -> None:
    checkpoint = opened(tiny_checkpoints, "video-dit-class")
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    labels = encode(["red square", "", "blue disc"])["class_labels"]
    assert labels.tolist() == [5, 6, 0]
    assert labels.dtype is torch.int64
    table = checkpoint.denoiser.load_transformer(torch.float32).class_embed
    assert len(table.weight) == 7
    with pytest.raises(DitLoraError, match=r"has no class 'a horse'; it has(.|\n)*red square"):
        encode(["a horse"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_conditions_sample_what_the_prompt_samples(tiny_checkpoints: Tiny, variant: str) -> None:
    """With guidance, so with the null condition too; with and without the text encoder."""
    checkpoint = opened(tiny_checkpoints, variant)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    sampling = Sampling(VideoShape(4, 32, 32), inference_steps=3, guidance_scale=3.0, seed=1)
    cached = checkpoint.sampler.prompt_kwargs(encode([CLASSES[4]]), encode([""]))
    textless_pipeline = checkpoint.sampler.pipeline(torch.float32, text=False)
    for pipeline in (textless_pipeline, full_pipeline := checkpoint.sampler.pipeline(torch.float32)):
        pipeline.set_progress_bar_config(disable=True)
    video = checkpoint.sampler.generate(textless_pipeline, cached, sampling)
    assert torch.equal(
        video, checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs(CLASSES[4]), sampling)
    )
    other_video = checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs(CLASSES[1]), sampling)
    assert (video.int() - other_video.int()).abs().max() > 0
    unguided = Sampling(sampling.shape, 3, 1.0, seed=1)
    plain = checkpoint.sampler.generate(full_pipeline, checkpoint.sampler.prompt_kwargs(CLASSES[4]), unguided)
    assert (video.int() - plain.int()).abs().max() > 0


def test_each_frame_is_encoded_by_itself(tiny_checkpoints: Tiny) -> None:
    encode = opened(tiny_checkpoints, "latte").encoders.load_video_encoder(torch.bfloat16, CPU)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (5, 3, 32, 48), generator=generator).to(torch.uint8)
    full_encoding, single_encoding = encode(pixels), encode(pixels[2:3])
    for name in ("latent_mean", "latent_logvar"):
        assert full_encoding[name].shape == (4, 5, 4, 6)
        assert full_encoding[name].dtype is torch.float32  # whatever the run computes in
        assert torch.equal(full_encoding[name][:, 2:3], single_encoding[name])


def test_a_short_text_in_a_batch_sees_only_its_own_tokens(tiny_checkpoints: Tiny) -> None:
    """Latte: what is behind a text's end, in a row or in the batch, changes nothing."""
    checkpoint = opened(tiny_checkpoints, "latte")
    batch = batch_of(checkpoint, ["a", "a much longer text than that", ""])
    assert batch["prompt_mask"].sum(1).tolist() == [2, 24, 1]
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    noisy, t = batch["latent_mean"], torch.tensor([5, 500, 990])
    with torch.no_grad():
        full_prediction = checkpoint.denoiser.predict(transformer, noisy, t, batch)
        altered_padding = torch.where(batch["prompt_mask"][..., None], batch["prompt_embeds"], 99.0)
        same_prediction = checkpoint.denoiser.predict(
            transformer, noisy, t, {**batch, "prompt_embeds": altered_padding}
        )
        torch.testing.assert_close(same_prediction, full_prediction, rtol=0, atol=0)
        for row in range(3):
            single_batch = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            single_prediction = checkpoint.denoiser.predict(
                transformer, noisy[row : row + 1], t[row : row + 1], single_batch
            )
            torch.testing.assert_close(single_prediction, full_prediction[row : row + 1], rtol=1e-4, atol=1e-5)


def class_values(values: Values, tiny: Tiny, folder: Path, **model: Any) -> Values:
    model = {"family": "video_dit", "path": str(tiny["video-dit-class"]), **model}
    data = {**values["data"], "path": str(folder), "frames": 4}
    return {**values, "model": model, "data": data}


def full(values: Values) -> Values:
    values = {name: value for name, value in values.items() if name != "lora"}
    values["train"] = {**values["train"], "mode": "full"}
    return {**values, "optim": {"groups": {"backbone": {"lr": 1e-3}}}}


@pytest.fixture
def new_classes(tmp_path: Path) -> Path:
    """UCF101's folders, of which one is a class that the tiny checkpoint has."""
    for name in ("YoYo", "RedDisc", "ApplyEyeMakeup"):
        write_avi(tmp_path / "ucf" / name / f"v_{name}_g01_c01.avi", "mpeg4", seed=len(name))
    shutil.move(tmp_path / "ucf" / "RedDisc", tmp_path / "ucf" / "red_disc")
    return tmp_path / "ucf"


def write_avi(path: Path, codec: str, seed: int) -> None:
    """12 frames of 64x48 noise at 25 fps, as UCF101's DivX files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = torch.randint(0, 256, (12, 6, 8, 3), generator=torch.Generator().manual_seed(seed))
    pixels = frames.repeat_interleave(8, 1).repeat_interleave(8, 2).to(torch.uint8)
    with av.open(path, "w", format="avi") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(25))
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame.numpy(), format="rgb24")))
        container.mux(stream.encode())


def test_from_scratch_the_classes_are_those_of_the_data(
    tiny_checkpoints: Tiny, recipe_values: Values, new_classes: Path
) -> None:
    values = full(class_values(recipe_values, tiny_checkpoints, new_classes, from_scratch={}))
    recipe = parse_recipe(values, "test")
    checkpoint = get_family("video_dit").open(recipe.model, recipe)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    captions = ["Apply Eye Makeup", "Yo Yo", "red disc", ""]
    assert encode(captions)["class_labels"].tolist() == [0, 1, 2, 3]
    model = checkpoint.denoiser.load_transformer(torch.float32)
    assert model.class_embed.weight.shape == (4, 32)
    assert not model.proj_out.weight.any()  # as DiT starts
    labels = {"0": "Apply Eye Makeup", "1": "Yo Yo", "2": "red disc"}
    assert checkpoint.info.model_index_changes() == {"id2label": labels}
    values["model"]["from_scratch"] = {"num_classes": 2}
    recipe = parse_recipe(values, "test")
    with pytest.raises(DitLoraError, match="num_classes is 2, and the data has 3 classes"):
        get_family("video_dit").open(recipe.model, recipe)


def test_full_training_adds_the_datas_classes_behind_the_old_ones(
    tiny_checkpoints: Tiny, recipe_values: Values, new_classes: Path
) -> None:
    """Old rows stay; new ones, and the moved null class, start as the null class was."""
    recipe = parse_recipe(full(class_values(recipe_values, tiny_checkpoints, new_classes)), "test")
    family = get_family("video_dit")
    stored = family.open(recipe.model)
    checkpoint: Any = family.open(recipe.model, recipe)
    encode = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    names = ["blue disc", "red disc", "Apply Eye Makeup", "Yo Yo", ""]
    assert encode(names)["class_labels"].tolist() == [0, 4, 6, 7, 8]
    old: Any = stored.denoiser.load_transformer(torch.float32)
    new = checkpoint.denoiser.load_transformer(torch.float32)
    assert torch.equal(new.class_embed.weight[:6], old.class_embed.weight[:6])
    for row in (6, 7, 8):
        assert torch.equal(new.class_embed.weight[row], old.class_embed.weight[6])
    assert new.config.num_classes == 8
    reopened: Any = family.open(recipe.model, index=checkpoint.info.model_index_changes())
    assert reopened.info.trained_classes == checkpoint.info.trained_classes


def test_a_lora_refuses_classes_that_the_checkpoint_has_not(
    tiny_checkpoints: Tiny, recipe_values: Values, new_classes: Path
) -> None:
    recipe = parse_recipe(class_values(recipe_values, tiny_checkpoints, new_classes), "test")
    with pytest.raises(DitLoraError, match="a LoRA cannot add them") as error:
        get_family("video_dit").open(recipe.model, recipe)
    assert "Apply Eye Makeup" in str(error.value)
    assert "red disc" not in str(error.value)


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
def test_ucf101s_folders_are_read_as_they_are(tmp_path: Path, codec: str) -> None:
    """`Class/clip.avi`: names become words, as OpenDiT's preprocess.py writes them to its CSV."""
    for name in ("BoxingPunchingBag", "YoYo"):
        write_avi(tmp_path / name / f"v_{name}_g01_c01.avi", codec, seed=1)
    clips = read_clips(DataConfig(path=str(tmp_path), frames=4, height=32, width=48, fps=8))
    assert [(clip.id, clip.caption) for clip in clips] == [
        ("BoxingPunchingBag/v_BoxingPunchingBag_g01_c01.avi", "Boxing Punching Bag"),
        ("YoYo/v_YoYo_g01_c01.avi", "Yo Yo"),
    ]


@pytest.mark.parametrize("variant", ["video-dit-class", "video-dit-text"])
def test_ucf101s_folders_train_either_model(
    tiny_checkpoints: Tiny,
    new_classes: Path,
    tmp_path: Path,
    lora_main: Callable[[list[str]], None],
    variant: str,
) -> None:
    """From avi files to a sample: names are classes of the one and texts of the other."""
    from launching import ROOT

    is_class = variant == "video-dit-class"
    name = "video_dit" if is_class else "video_dit_lora"
    lora_main(
        [
            str(ROOT / "recipes" / "smoke" / f"{name}.yaml"),
            f"model.path={tiny_checkpoints[variant]}",
            f"data.path={new_classes}",
            f"run.dir={tmp_path / 'run'}",
            "train.steps=2",
            "validation.prompts=[Yo Yo]",
            "validation.inference_steps=2",
        ]
    )
    assert (tmp_path / "run" / "samples" / "step_000002" / "prompt_00.mp4").is_file()
    cache = TensorCache(tmp_path / "cache" / "texts")
    texts = [cache.read(entry.key, {})[0] for entry in cache.iter_entries()]
    assert len(texts) == 4  # three captions and the empty one
    if is_class:
        assert sorted(int(text["class_labels"]) for text in texts) == [0, 1, 2, 3]
        index = json.loads((tmp_path / "run" / "model" / "model_index.json").read_text())
        assert index["id2label"]["1"] == "Yo Yo"
    else:
        assert {tuple(text["pooled_projections"].shape) for text in texts} == {(16,)}


def test_a_class_folder_without_media_is_named(tiny_checkpoints: Tiny, recipe_values: Values, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "data", images=3, height=32, width=48)
    (tmp_path / "data" / "YoYo").mkdir()
    (tmp_path / "data" / "YoYo" / "notes.md").write_text("none yet")
    recipe = parse_recipe(class_values(recipe_values, tiny_checkpoints, tmp_path / "data"), "test")
    with pytest.raises(DitLoraError, match=r"data(.|\n)*YoYo: this class folder holds no video and no image"):
        get_family("video_dit").open(recipe.model, recipe)


def test_labels_outside_the_table_are_refused(tiny_checkpoints: Tiny) -> None:
    pipeline = opened(tiny_checkpoints, "video-dit-class").sampler.pipeline(torch.float32)
    with pytest.raises(DitLoraError, match=r"class_labels must be in 0\.\.6"):
        pipeline(class_labels=torch.tensor([1, 7]))
    with pytest.raises(DitLoraError, match=r"unknown class a horse; choose from(.|\n)*red disc"):
        pipeline("a horse")
    with pytest.raises(DitLoraError, match="give one of prompt, class_labels"):
        pipeline()


def test_patches_in_time_make_frames_a_multiple(tiny_checkpoints: Tiny) -> None:
    """A 2x2x2 model: the nearest that fit are named, all at once."""
    checkpoint = opened(tiny_checkpoints, "video-dit-text", from_scratch={"patch_size_t": 2})
    checkpoint.info.check_shape(VideoShape(6, 32, 48))
    with pytest.raises(DitLoraError) as error:
        checkpoint.info.check_shape(VideoShape(5, 24, 48))
    message = str(error.value)
    assert "data.frames must be a multiple of 2; got 5, nearest 4 and 6" in message
    assert "data.height must be a multiple of 16; got 24, nearest 16 and 32" in message
    model = checkpoint.denoiser.load_transformer(torch.float32)
    assert model.patch == (2, 2, 2)


def altered(path: Path, out: Path, component: str, **values: Any) -> Path:
    """A copy of a checkpoint with values of one config changed."""
    shutil.copytree(path, out)
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    file = out / component / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


@pytest.mark.parametrize(
    ("variant", "component", "values", "words"),
    [
        ("latte", "scheduler", {"prediction_type": "v_prediction"}, "family latte predicts noise"),
        ("video-dit-text", "scheduler", {"rescale_betas_zero_snr": True}, "ends in pure noise"),
        ("latte", "transformer", {"out_channels": 4}, "out_channels must be 8; got 4"),
        ("video-dit-class", "transformer", {"out_channels": 12}, "says out_channels=12"),
    ],
)
def test_checkpoints_of_another_kind_are_refused(
    tiny_checkpoints: Tiny,
    tmp_path: Path,
    variant: str,
    component: str,
    values: Values,
    words: str,
) -> None:
    path = altered(tiny_checkpoints[variant], tmp_path / "altered", component, **values)
    with pytest.raises(DitLoraError, match=words):
        opened({variant: path}, variant)


def test_pipelines_of_other_families_are_refused(tiny_checkpoints: Tiny) -> None:
    path = str(tiny_checkpoints["cogvideox-2b"])
    for family, message in (("video_dit", "trains VideoDiTPipeline"), ("latte", "LattePipeline")):
        model = ModelConfig(family=family, path=path)
        with pytest.raises(DitLoraError, match=f"is a CogVideoXPipeline checkpoint.*{message}"):
            get_family(family).open(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_that_do_not_apply_are_refused(
    tiny_checkpoints: Tiny, recipe_values: Values, shape_clips: Path, tmp_path: Path, variant: str
) -> None:
    write_class_folders(tmp_path / "data", images=6, height=32, width=48, frames=4)
    model = {"family": VARIANTS[variant], "path": str(tiny_checkpoints[variant])}
    data = {**recipe_values["data"], "path": str(tmp_path / "data"), "frames": 4}
    values = {**recipe_values, "model": model, "data": data}

    def prepared(**changed: Values) -> Any:
        merged = {name: {**values.get(name, {}), **changed.get(name, {})} for name in values}
        recipe: Recipe = parse_recipe(merged, "test")
        return get_family(VARIANTS[variant]).open(recipe.model, recipe)

    assert prepared().denoiser.should_train_variance
    assert not prepared(train={"vlb": False}).denoiser.should_train_variance
    with pytest.raises(DitLoraError, match=r"data\.image_dropout: family"):
        prepared(data={"image_dropout": 0.1})
    if variant == "video-dit-class":
        with pytest.raises(DitLoraError, match=r"validation\.prompts: unknown class 'a horse'"):
            prepared(validation={"prompts": ["red disc", "a horse"]})


def test_without_a_learned_variance_there_is_no_bound(tiny_checkpoints: Tiny, recipe_values: Values) -> None:
    model = {"path": str(tiny_checkpoints["video-dit-text"]), "from_scratch": {"out_channels": 4}}
    values = full({**recipe_values, "model": {"family": "video_dit", **model}})
    recipe = parse_recipe(values, "test")
    checkpoint: Any = get_family("video_dit").open(recipe.model, recipe)
    assert not checkpoint.denoiser.should_train_variance
    batch = batch_of(checkpoint, ["a", "b"])
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    losses = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [1, 2])).losses
    noise = draw_normal_noise(batch["latent_mean"].shape[1:], RandomStreams(0, [1, 2])("noise"))
    torch.testing.assert_close(losses, noise.square().flatten(1).mean(1))  # the output starts at zero
    values["train"]["vlb"] = True
    recipe = parse_recipe(values, "test")
    with pytest.raises(DitLoraError, match=r"train\.vlb: .* has no learned variance"):
        get_family("video_dit").open(recipe.model, recipe)
