"""Stand-in for decord: all frames of a clip, read by PyAV."""

from collections.abc import Sequence
from types import SimpleNamespace

import av
import torch

bridge = SimpleNamespace(set_bridge=lambda name: None)


class VideoReader:
    """The frames of a clip, uint8 (F, H, W, 3)."""

    def __init__(self, uri: str) -> None:
        with av.open(uri) as container:
            pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        self.frames = torch.stack([torch.from_numpy(picture) for picture in pictures])

    def __len__(self) -> int:
        return len(self.frames)

    def get_batch(self, indices: Sequence[int]) -> torch.Tensor:
        return self.frames[list(indices)]
