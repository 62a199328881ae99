"""The loss of a batch, computed once more from the modules of Diffusers' own modular pipeline alone."""

from pathlib import Path

import torch
from diffusers import ModularPipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc"]
SHAPE = VideoShape(1, 48, 80)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, draws: RandomInputs) -> torch.Tensor:
    """The loss for pixels (B, 3, H, W), noise and noise of the posterior (B, 16, 1, 6, 10), and levels (B,)."""
    pipe = ModularPipeline.from_pretrained(str(path))
    pipe.load_components()
    embeddings = []
    for caption in CAPTIONS:
        # The text encoder sees a caption of no tokens as one masked token.
        tokens = pipe.tokenizer(caption, return_tensors="pt").input_ids.long() if caption else torch.zeros(1, 1).long()
        mask = torch.full(tokens.shape, int(bool(caption)))
        states = pipe.text_encoder(input_ids=tokens, attention_mask=mask).last_hidden_state * mask[..., None]
        ids = pipe.t5_tokenizer(caption, return_tensors="pt")
        embeddings.append(pipe.text_conditioner(states, ids.input_ids, ids.attention_mask, mask))
    posterior = pipe.vae.encode(pixels.float()[:, :, None] / 127.5 - 1).latent_dist
    latent = posterior.mean + posterior.std * draws.tensors["posterior"]
    config = pipe.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    clean, noise = (latent - mean) / std, draws.tensors["noise"]
    s = draws.tensors["timestep"].view(-1, 1, 1, 1, 1)
    velocity = pipe.transformer(
        hidden_states=(1 - s) * clean + s * noise,
        timestep=draws.tensors["timestep"],
        encoder_hidden_states=torch.cat(embeddings),
        padding_mask=torch.zeros(1, 1, *pixels.shape[-2:]),
    ).sample
    return (velocity - (noise - clean)).square().mean(dim=(1, 2, 3, 4))


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(tiny_checkpoints: dict[str, Path]) -> None:
    path, generator = tiny_checkpoints["anima"], torch.Generator().manual_seed(6)
    checkpoint = get_family("anima").open(ModelConfig(family="anima", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    latents = [encode_picture(picture) for picture in pictures]
    batch = {
        **{name: torch.stack([latent[name] for latent in latents]) for name in latents[0]},
        **encode_text(CAPTIONS),
    }
    # Noise and timesteps as the family draws them.
    noise = {
        name: draw([generator] * 3) for name, draw in checkpoint.denoiser.get_random_input_samplers(batch).items()
    }
    ahead = RandomInputs(0, (0, 1, 2), noise)
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        theirs = losses_by_diffusers(path, torch.cat(pictures), ahead)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
