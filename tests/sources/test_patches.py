"""Batches of images beside text: in the layout that the model reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckplan.sources.batches.context import Context
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.tasks import TASKS

PLACE = 9
GRID = 32 * 32  # patches of an image whose patches are merged by two
NUMBERS = {
    "vocab_size": 20,
    "model_type": "any",
    "image_size": 6,
    "patch_size": 2,
    "image_token_id": PLACE,
}


def batch_of(model: nn.Module, **config: Any) -> dict[str, Any]:
    named = SimpleNamespace(**{**NUMBERS, **config})
    model.config = named  # type: ignore[assignment]
    context = Context(model, named, Sizes.of("2"), "image-text-to-text")
    return TASKS["image-text-to-text"].make(context)


class Grids(nn.Module):
    """Reads patches of one shape only, four of them for each token."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        image_merge_sizes: Tensor,
        input_ids: Tensor,
    ) -> None: ...

    def get_image_features(
        self, pixel_values: Tensor, image_merge_sizes: Tensor
    ) -> Tensor:
        assert (image_merge_sizes == 2).all()
        if pixel_values.shape[1:] != self.shape:
            raise ValueError("another layout")
        return torch.zeros(len(pixel_values) // 4, 3)


@pytest.mark.parametrize("shape", [(12,), (3, 2, 2), (24,)])
def test_patches_have_the_layout_that_the_model_reads(shape: tuple[int, ...]) -> None:
    batch = batch_of(Grids(*shape))
    assert batch["pixel_values"].shape == (2 * GRID, *shape)
    assert (batch["input_ids"] == PLACE).sum(1).tolist() == [GRID // 4] * 2


class Rows(nn.Module):
    def forward(
        self, pixel_values: Tensor, target_sizes: Tensor, input_ids: Tensor
    ) -> None: ...

    def get_image_features(self, pixel_values: Tensor, target_sizes: Tensor) -> Tensor:
        return torch.zeros(int(target_sizes.prod(1).sum()), pixel_values.shape[2])


def test_patches_in_a_row_come_with_the_sizes_of_their_images() -> None:
    batch = batch_of(Rows())
    assert batch["pixel_values"].shape == (1, 3, 2, 2 * 16 * 16 * 2)
    assert batch["target_sizes"].tolist() == [[16, 16]] * 2
    assert (batch["input_ids"] == PLACE).sum(1).tolist() == [256, 256]


class Placed(nn.Module):
    def forward(
        self, pixel_values: Tensor, image_position_ids: Tensor, input_ids: Tensor
    ) -> None: ...

    def get_image_features(
        self, pixel_values: Tensor, image_position_ids: Tensor
    ) -> Tensor:
        return pixel_values[:, :: 3 * 3]


def test_patches_come_with_their_places_and_can_be_pooled() -> None:
    batch = batch_of(Placed(), pooling_kernel_size=3)
    assert batch["pixel_values"].shape == (2, 15 * 15, 3 * 2 * 2)
    places = batch["image_position_ids"]
    assert {tuple(place) for place in places[1].tolist()} == {
        (column, row) for column in range(15) for row in range(15)
    }
    assert (batch["input_ids"] == PLACE).sum(1).tolist() == [25, 25]


def test_patches_are_pooled_already_where_the_model_reads_such() -> None:
    class Pooled(Placed):
        def get_image_features(
            self, pixel_values: Tensor, image_position_ids: Tensor
        ) -> Tensor:
            if pixel_values.shape[2] != 3 * (2 * 3) ** 2:
                raise ValueError("another layout")
            return pixel_values

    batch = batch_of(Pooled(), pooling_kernel_size=3)
    assert batch["pixel_values"].shape == (2, 25, 3 * 6 * 6)
    assert batch["image_position_ids"].amax((0, 1)).tolist() == [4, 4]
    assert (batch["input_ids"] == PLACE).sum(1).tolist() == [25, 25]


class Tiles(nn.Module):
    def forward(
        self, pixel_values: Tensor, pixel_attention_mask: Tensor, input_ids: Tensor
    ) -> None: ...

    def get_image_features(
        self, pixel_values: Tensor, pixel_attention_mask: Tensor
    ) -> Tensor:
        return pixel_values[pixel_attention_mask][:, 0]  # fails without tiles


def test_a_mask_of_tiles_that_must_be_given_is_given() -> None:
    batch = batch_of(Tiles())
    assert batch["pixel_values"].shape == (2, 1, 3, 6, 6)
    assert batch["pixel_attention_mask"].tolist() == [[True]] * 2


class Frames(nn.Module):
    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> None: ...

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        rows, frames, _, height, _ = pixel_values.shape
        return torch.zeros(rows * frames * height, 3)


def test_an_image_is_a_tile_where_the_model_reads_no_other() -> None:
    assert batch_of(Frames())["pixel_values"].shape == (2, 1, 3, 6, 6)


class Flat(nn.Module):
    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> None: ...

    def get_image_features(self, pixel_values: Tensor) -> Any:
        if pixel_values.shape[1:] != (9, 3 * 2 * 2):
            raise ValueError("another layout")
        return SimpleNamespace(last_hidden_state=pixel_values, pooler_output=None)


def test_an_image_is_its_flat_patches_where_the_model_reads_no_other() -> None:
    batch = batch_of(Flat())
    assert batch["pixel_values"].shape == (2, 9, 12)
    assert (batch["input_ids"] == PLACE).sum(1).tolist() == [9, 9]


class Film(nn.Module):
    """Has features of videos alone, and a token of its own for them."""

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> None: ...

    def get_video_features(self, pixel_values: Tensor) -> Tensor:
        return pixel_values.flatten(1, 2)


def test_a_model_of_videos_has_places_of_videos() -> None:
    batch = batch_of(Film(), video_token_id=8)
    assert (batch["input_ids"] == 8).sum(1).tolist() == [3 * 6] * 2


class Robot(nn.Module):
    """Acts on what a model inside sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([Seeing()])

    def forward(
        self,
        state: Tensor,
        actions: Tensor,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor,
        input_ids: Tensor,
    ) -> None: ...


class Seeing(nn.Module):
    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return torch.zeros(len(pixel_values), 4, 3)


def test_a_robot_is_given_its_state_and_actions_and_no_labels() -> None:
    sizes = {"chunk_size": 5, "max_state_dim": 7, "max_action_dim": 8}
    batch = batch_of(Robot(), **sizes)
    assert batch["state"].shape == (2, 7)
    assert batch["actions"].shape == (2, 5, 8)
    assert batch["pixel_values"].shape == (2, 1, 3, 6, 6)  # of one camera
    assert batch["pixel_attention_mask"].tolist() == [[True]] * 2
    assert (batch["input_ids"] == PLACE).sum(1).tolist() == [4, 4]
    assert "labels" not in batch


class Told(nn.Module):
    """Is told which tokens are of the image, and which see it."""

    def forward(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        image_embeds_position_mask: Tensor,
        image_attention_mask: Tensor,
    ) -> None: ...


def test_tokens_of_an_image_are_told_to_models_that_ask() -> None:
    batch = batch_of(Told(), latent_query_num=4)
    length = batch["input_ids"].shape[1]
    where = batch["image_embeds_position_mask"]
    assert where.shape == (2, length)
    assert where.sum(1).tolist() == [4, 4]
    assert batch["image_attention_mask"].shape == (2, length, 1)
