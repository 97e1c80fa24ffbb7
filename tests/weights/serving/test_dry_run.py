"""The dry run: names, fused or split as servers have them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from rollfeed.errors import CheckpointError
from rollfeed.model_files import TensorHeader
from rollfeed.weights.serving import served_tensors

LAYER = "model.layers.0.self_attn"


def headers(**rows: int) -> dict[str, TensorHeader]:
    """Matrices of four columns, dots written as two underscores."""
    return {name.replace("__", "."): TensorHeader((count, 4), "BF16") for name, count in rows.items()}


SPLIT = headers(
    model__layers__0__self_attn__q_proj__weight=6,
    model__layers__0__self_attn__k_proj__weight=2,
    model__layers__0__self_attn__v_proj__weight=2,
)
FUSED = headers(model__layers__0__self_attn__qkv_proj__weight=10)


@pytest.mark.parametrize("of_torch", [True, False])
def test_what_is_split_here_and_fused_there_goes_over_fused_and_the_other_way_round(of_torch: bool) -> None:
    whole = torch.arange(40.0).reshape(10, 4) if of_torch else np.arange(40.0).reshape(10, 4)
    split = served_tensors({f"{LAYER}.qkv_proj.weight": whole}, SPLIT)
    assert {name: tuple(part.shape) for name, part in split.items()} == {n: header.shape for n, header in SPLIT.items()}
    assert split[f"{LAYER}.k_proj.weight"].tolist() == whole[6:8].tolist()
    fused = served_tensors(split, FUSED)
    assert fused.keys() == FUSED.keys()
    assert fused[f"{LAYER}.qkv_proj.weight"].tolist() == whole.tolist()


def test_a_fused_tensor_of_another_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"has 9 rows, and its parts in servers \[6, 2, 2\]"):
        served_tensors({f"{LAYER}.qkv_proj.weight": torch.zeros(9, 4)}, SPLIT)


def test_a_name_that_servers_do_not_know_is_refused() -> None:
    given = {**dict.fromkeys(FUSED, torch.zeros(10, 4)), "model.layers.0.mlp.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.weight' is none .* change nothing"):
        served_tensors(given, FUSED)


def test_a_head_that_is_the_embeddings_may_be_given_under_its_own_name() -> None:
    stored = headers(model__embed_tokens__weight=8)
    given = {"model.embed_tokens.weight": torch.zeros(8, 4), "lm_head.weight": torch.zeros(8, 4)}
    assert served_tensors(given, stored).keys() == given.keys()


def test_a_tensor_missing_beside_others_is_refused_and_a_part_that_is_not_trained_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = headers(
        model__layers__0__a__weight=1,
        model__layers__0__b__weight=1,
        model__layers__1__a__weight=1,
        model__layers__1__b__weight=1,
        lm_head__weight=8,
    )
    both = {"model.layers.0.a.weight": torch.zeros(1, 4), "model.layers.0.b.weight": torch.zeros(1, 4)}
    head = {"lm_head.weight": torch.zeros(8, 4)}
    with caplog.at_level(logging.WARNING):
        assert served_tensors({**both, **head}, stored).keys() == {*both, *head}
    assert "left as servers have it: model.layers.1" in caplog.text
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        served_tensors(both, stored)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.b\.weight' is missing \(1 of 'model\.layers\.0'"):
        served_tensors({"model.layers.0.a.weight": torch.zeros(1, 4), **head}, stored)


def test_constants_that_old_checkpoints_carry_may_be_missing() -> None:
    stored = headers(h__0__attn__bias=1, h__0__attn__masked_bias=1, h__0__attn__weight=1)
    assert list(served_tensors({"h.0.attn.weight": torch.zeros(1, 4)}, stored)) == ["h.0.attn.weight"]


def test_scales_are_made_and_need_not_be_given() -> None:
    stored = headers(model__layers__0__a__weight=1, model__layers__0__a__weight_scale_inv=1)
    assert list(served_tensors({"model.layers.0.a.weight": torch.zeros(1, 4)}, stored)) == ["model.layers.0.a.weight"]
