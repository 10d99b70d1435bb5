"""Low-rank pairs on weights: an exact start and exact merging."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.growth.adapters.finding import find_weights
from esper.growth.adapters.weights import AdaptedWeight


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as in GPT-2 of Hugging Face."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "transposed": (lambda: Conv1D(4, 6), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, stride=2), (3, 6, 9)),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), (3, 6, 9, 9)),
    "groups": (lambda: nn.Conv2d(6, 4, 3, groups=2), (3, 6, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, bias=False), (3, 6, 9, 9)),
}


def adapt(layer: nn.Module, rank: int = 2) -> AdaptedWeight:
    """Put a random pair on the weight of a layer."""
    ((name, found),) = find_weights(layer).weights.items()
    one = AdaptedWeight(name, found.module, found.tensor, found.layout, 0.5)
    kind = one.weight.dtype
    one.pair.A = nn.Parameter(torch.randn(rank, one.columns, dtype=kind))
    one.pair.B = nn.Parameter(torch.randn(one.rows, rank, dtype=kind))
    return one


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_merging_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    names, order, own = type(layer), list(layer.state_dict()), layer(x)
    one = adapt(layer)
    adapted = layer(x)
    assert not torch.allclose(adapted, own)
    values = getattr(layer, one.tensor).detach().clone()
    one.release(merged=True)
    assert torch.equal(getattr(layer, one.tensor), values)
    assert torch.equal(layer(x), adapted)
    assert type(layer) is names
    assert list(layer.state_dict()) == order
    assert [name for name, _ in layer.named_parameters()] == order


def test_a_pair_of_a_convolution_is_a_convolution_and_one_of_1_by_1() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False), torch.randn(2, 3, 8, 8)
    own = layer(x)
    one = adapt(layer)
    filters = one.pair.A.view(2, 3, 3, 3)
    inner = nn.functional.conv2d(x, filters, stride=2, padding=1)
    extra = 0.5 * nn.functional.conv2d(inner, one.pair.B[:, :, None, None])
    torch.testing.assert_close(layer(x), own + extra)


def test_settled_components_stay_in_the_weight() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    one = adapt(layer)
    before = layer(x)
    one.pair.settle([0, 1])
    one.pair.A = nn.Parameter(torch.randn(3, 6))
    one.pair.B = nn.Parameter(torch.zeros(4, 3))
    torch.testing.assert_close(layer(x), before)
    assert (one.pair.rank, one.pair.settled) == (3, 2)


def test_half_precision_is_adapted_in_single() -> None:
    layer = nn.Linear(6, 4).bfloat16()
    one = adapt(layer)
    one.pair.A, one.pair.B = (nn.Parameter(p.float()) for p in (one.pair.A, one.pair.B))
    assert layer(torch.randn(3, 6).bfloat16()).dtype is torch.bfloat16
    assert AdaptedWeight("w", nn.Linear(2, 2).half(), "weight", "linear", 1.0).pair.A.dtype is (
        torch.float32
    )


def test_attention_is_adapted_in_training_and_on_the_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    found = find_weights(layer).weights
    assert set(found) == {
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    }
    before = layer(x)
    for name, one in found.items():
        pair = AdaptedWeight(name, one.module, one.tensor, one.layout, 1.0).pair
        pair.A = nn.Parameter(0.3 * torch.randn(2, pair.A.shape[1]))
        pair.B = nn.Parameter(0.3 * torch.randn(pair.B.shape[0], 2))
    slow = layer(x)
    assert not torch.allclose(slow, before, atol=1e-2)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), slow, rtol=1e-4, atol=1e-5)
