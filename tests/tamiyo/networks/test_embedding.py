from __future__ import annotations

import torch

from esper.leyline.blueprints import NUM_BLUEPRINTS
from esper.tamiyo.networks.embedding import BlueprintEmbedding


def test_empty_slots_have_the_last_row() -> None:
    embedding = BlueprintEmbedding()
    rows = embedding(torch.tensor([[-1, 0, 12]]))
    assert rows.shape == (1, 3, 4)
    weight = embedding.embedding.weight
    assert weight.shape == (NUM_BLUEPRINTS + 1, 4)
    assert torch.equal(rows[0], weight[[13, 0, 12]])


def test_the_indices_are_left_as_they_are() -> None:
    indices = torch.tensor([-1, 2])
    BlueprintEmbedding()(indices)
    assert indices.tolist() == [-1, 2]


def test_the_null_index_is_a_buffer_but_no_weight() -> None:
    embedding = BlueprintEmbedding(20, 3)
    (buffer,) = embedding.buffers()
    assert buffer.dtype == torch.int64
    assert int(buffer) == 20
    assert list(embedding.state_dict()) == ["embedding.weight"]


def test_rows_start_small() -> None:
    weight = BlueprintEmbedding(500, 8).embedding.weight
    assert 0.018 < float(weight.detach().std()) < 0.022


def test_empty_slots_learn_too() -> None:
    embedding = BlueprintEmbedding()
    embedding(torch.tensor([-1])).sum().backward()
    assert embedding.embedding.weight.grad is not None
    assert embedding.embedding.weight.grad[13].abs().sum() > 0
    assert embedding.embedding.weight.grad[:13].abs().sum() == 0
