"""Encoding on the fly: undecodable or bad samples are reported as a cache reports them."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError
from dit_lora.data.sources.clips import Clip
from dit_lora.training.tasks.diffusion.cache_plan import CacheEntryEncoder, DecodedSample
from dit_lora.training.tasks.diffusion.live_encoding import OnTheFlyTextEncoder, OnTheFlyVideoEncoder, WorkerDecoder
from dit_lora.training.tasks.diffusion.samples import BucketedSample

SHAPE = VideoShape(1, 4, 6)


class _Decoding:
    """Stands for `CacheEntryEncoder.decode`."""

    has_masks = False

    def make_silence(self, shape: VideoShape) -> None:
        return None

    def decode_sample(self, sample: BucketedSample, *, mirrored: bool) -> DecodedSample:
        if sample.id == "torn":
            raise ClipError("torn cannot be decoded")
        return DecodedSample(torch.full((1, 3, 4, 6), 7 + mirrored, dtype=torch.uint8), None)


def encode(video: torch.Tensor, image: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    mean = video.float().mean((0, 2, 3))
    return {"latent": torch.where(mean == 8, torch.nan, mean)}


@pytest.fixture
def videos() -> OnTheFlyVideoEncoder:
    clips = {name: Clip(name, MediaFile(Path(name)), "x") for name in ("good", "torn")}
    samples = {
        "good": (BucketedSample("good", clips["good"], SHAPE), False),
        "mirror": (BucketedSample("good", clips["good"], SHAPE), True),
        "torn": (BucketedSample("torn", clips["torn"], SHAPE), False),
    }
    return OnTheFlyVideoEncoder(WorkerDecoder(cast(CacheEntryEncoder, _Decoding()), samples), encode)


def test_a_sample_is_encoded_and_its_spec_known_without_one(videos: OnTheFlyVideoEncoder) -> None:
    assert videos.read_first_entry_spec(["torn"]) == {"latent": (torch.Size([3]), torch.float32)}
    tensors, fault = videos.read("good", {})
    assert (tensors["latent"].tolist(), fault) == ([7, 7, 7], None)


def test_what_a_worker_decoded_is_taken_once(videos: OnTheFlyVideoEncoder) -> None:
    videos.decoded_samples["good"] = DecodedSample(torch.full((1, 3, 4, 6), 5, dtype=torch.uint8), None)
    assert videos.read("good", {})[0]["latent"].tolist() == [5, 5, 5]
    assert videos.read("good", {})[0]["latent"].tolist() == [7, 7, 7]


def test_bad_values_and_torn_clips_are_faults(videos: OnTheFlyVideoEncoder) -> None:
    tensors, fault = videos.read("mirror", {})
    assert fault == "latent has 3 NaN among 3 values"
    tensors, fault = videos.read("torn", videos.read_first_entry_spec(["torn"]))
    assert fault == "torn cannot be decoded"
    assert tensors["latent"].isnan().all()


def test_captions_are_encoded_once_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captions = {"1": "one", "2": "two", "3": "bad"}
    requests: list[Any] = []

    def encode_text(captions: Any) -> dict[str, torch.Tensor]:
        requests.extend(captions)
        value = torch.inf if captions == ["bad"] else 1.0
        return {"embeds": torch.full((1, 2), value)}

    monkeypatch.setattr("dit_lora.training.tasks.diffusion.live_encoding._MAX_CACHED_CAPTIONS", 2)
    digests, facts = Digests(tmp_path / "digests.json"), dict[str, str]()
    encoding = CacheEntryEncoder(cast(Recipe, None), digests, facts, facts)
    texts = OnTheFlyTextEncoder(
        {key: encoding.make_text_job(caption) for key, caption in captions.items()}, encode_text
    )
    assert texts.read("1", {}) == texts.read("1", {})
    assert texts.read("3", {})[1] == "caption 'bad': embeds has 2 Inf among 2 values"
    texts.read("2", {})  # the first is forgotten
    texts.read("1", {})
    assert requests == ["one", "bad", "two", "one"]
