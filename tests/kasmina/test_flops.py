"""Operations of a forward pass, against counts written out by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.flops import count_flops, formula_of
from esper.leyline.errors import EsperWarning

Case = tuple[Callable[[], nn.Module], Callable[[], Any], int]


class Function(nn.Module):
    """A function of a user's own, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class AdaptiveScores(nn.AdaptiveLogSoftmaxWithLoss):
    """Called for all classes, without a target."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.log_prob(x)


def zeros(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.zeros(shape) for shape in shapes)


def tokens(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.zeros(shape, dtype=torch.int64),)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, **options)


def decoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(12, 2, 24, batch_first=True, **options)


def padded() -> dict[str, Tensor]:
    mask = torch.zeros(2, 17, dtype=torch.bool)
    mask[0, 9:] = True
    return {"src": torch.randn(2, 17, 12), "src_key_padding_mask": mask}


# A multiplication with its addition is 2. Attention of width E over T queries and S keys projects
# queries and results (2 T E E each) and keys and values (2 S E E each), and multiplies every query
# with every key and every weight with every value (2 T S E each).
ATTENTION = 2 * (17 + 17 + 17 + 17) * 12 * 12 + 2 * 2 * 17 * 17 * 12
FEED_FORWARD = 2 * 2 * 17 * 12 * 24
CROSS = 2 * (17 + 17 + 5 + 5) * 12 * 12 + 2 * 2 * 17 * 5 * 12

LAYERS: dict[str, Case] = {
    "linear": (lambda: nn.Linear(3, 5), zeros((2, 3)), 2 * 2 * 3 * 5),
    "linear of tokens": (lambda: nn.Linear(3, 5, bias=False), zeros((2, 7, 3)), 2 * 14 * 3 * 5),
    "linear of one sample": (lambda: nn.Linear(3, 5), zeros((3,)), 2 * 3 * 5),
    "bilinear": (
        # First input with the weight, then the result with the second input.
        lambda: nn.Bilinear(3, 4, 5),
        zeros((2, 3), (2, 4)),
        2 * 2 * 5 * 3 * 4 + 2 * 2 * 5 * 4,
    ),
    # An LSTM has 4 gates, a GRU 3, an RNN 1; each sees the input and the hidden state.
    "lstm": (
        lambda: nn.LSTM(8, 8, batch_first=True),
        zeros((1, 8, 8)),
        2 * 8 * 4 * 8 * (8 + 8),
    ),
    "lstm of a batch, time first": (
        lambda: nn.LSTM(3, 5),
        zeros((7, 2, 3)),
        2 * 7 * 2 * 4 * 5 * (3 + 5),
    ),
    "lstm without a batch": (lambda: nn.LSTM(3, 5), zeros((7, 3)), 2 * 7 * 4 * 5 * (3 + 5)),
    "lstm, two layers": (
        lambda: nn.LSTM(3, 5, num_layers=2, dropout=0.5),
        zeros((7, 2, 3)),
        2 * 14 * 4 * 5 * (3 + 5) + 2 * 14 * 4 * 5 * (5 + 5),
    ),
    "lstm, both ways": (
        lambda: nn.LSTM(3, 5, bidirectional=True),
        zeros((7, 2, 3)),
        2 * (2 * 14 * 4 * 5 * (3 + 5)),
    ),
    "lstm, two layers both ways": (
        lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True, bias=False),
        zeros((7, 2, 3)),
        2 * (2 * 14 * 4 * 5 * (3 + 5)) + 2 * (2 * 14 * 4 * 5 * (10 + 5)),
    ),
    "lstm with projection": (
        # The hidden state has 2 numbers, made from the cell's 5 by another matrix.
        lambda: nn.LSTM(3, 5, proj_size=2),
        zeros((7, 2, 3)),
        2 * 14 * 4 * 5 * (3 + 2) + 2 * 14 * 2 * 5,
    ),
    "lstm with projection, two layers both ways": (
        lambda: nn.LSTM(3, 5, num_layers=2, proj_size=2, bidirectional=True),
        zeros((7, 2, 3)),
        2 * 2 * 14 * (4 * 5 * (3 + 2) + 2 * 5) + 2 * 2 * 14 * (4 * 5 * (4 + 2) + 2 * 5),
    ),
    "gru": (lambda: nn.GRU(3, 5), zeros((7, 2, 3)), 2 * 14 * 3 * 5 * (3 + 5)),
    "gru, two layers both ways": (
        lambda: nn.GRU(3, 5, num_layers=2, bidirectional=True, batch_first=True),
        zeros((2, 7, 3)),
        2 * (2 * 14 * 3 * 5 * (3 + 5)) + 2 * (2 * 14 * 3 * 5 * (10 + 5)),
    ),
    "rnn": (lambda: nn.RNN(3, 5, nonlinearity="relu"), zeros((7, 2, 3)), 2 * 14 * 5 * (3 + 5)),
    "rnn, two layers both ways": (
        lambda: nn.RNN(3, 5, num_layers=2, bidirectional=True),
        zeros((7, 2, 3)),
        2 * (2 * 14 * 5 * (3 + 5)) + 2 * (2 * 14 * 5 * (10 + 5)),
    ),
    "lstm cell": (lambda: nn.LSTMCell(3, 5), zeros((2, 3)), 2 * 2 * 4 * 5 * (3 + 5)),
    "gru cell": (lambda: nn.GRUCell(3, 5), zeros((2, 3)), 2 * 2 * 3 * 5 * (3 + 5)),
    "rnn cell": (lambda: nn.RNNCell(3, 5), zeros((2, 3)), 2 * 2 * 5 * (3 + 5)),
    "attention": (
        lambda: nn.MultiheadAttention(12, 2, batch_first=True),
        zeros(*[(1, 17, 12)] * 3),
        ATTENTION,
    ),
    "attention to others": (
        lambda: nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True),
        zeros((2, 17, 12), (2, 5, 12), (2, 5, 12)),
        2 * CROSS,
    ),
    "attention to others of other widths, with a bias and a zero": (
        # Keys are 4 wide and values 6; two more keys are attended to than are projected.
        lambda: nn.MultiheadAttention(
            12, 2, kdim=4, vdim=6, add_bias_kv=True, add_zero_attn=True, batch_first=True
        ),
        zeros((1, 17, 12), (1, 5, 4), (1, 5, 6)),
        2 * (17 + 17) * 12 * 12 + 2 * 5 * 4 * 12 + 2 * 5 * 6 * 12 + 2 * 2 * 17 * 7 * 12,
    ),
    "encoder layer": (encoder_layer, zeros((1, 17, 12)), ATTENTION + FEED_FORWARD),
    "encoder layer, norm first": (
        lambda: encoder_layer(norm_first=True, activation="gelu"),
        zeros((1, 17, 12)),
        ATTENTION + FEED_FORWARD,
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(encoder_layer(), 3, enable_nested_tensor=False),
        zeros((2, 17, 12)),
        2 * 3 * (ATTENTION + FEED_FORWARD),
    ),
    "encoder with padding": (
        # Evaluation would pack the batch; every token counts, padded or not, as in training.
        lambda: nn.TransformerEncoder(encoder_layer(), 2),
        padded,
        2 * 2 * (ATTENTION + FEED_FORWARD),
    ),
    "decoder layer": (
        decoder_layer,
        zeros((1, 17, 12), (1, 5, 12)),
        ATTENTION + CROSS + FEED_FORWARD,
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(decoder_layer(), 2),
        zeros((2, 17, 12), (2, 5, 12)),
        2 * 2 * (ATTENTION + CROSS + FEED_FORWARD),
    ),
    "transformer": (
        lambda: nn.Transformer(12, 2, 1, 1, 24, batch_first=True),
        zeros((1, 17, 12), (1, 17, 12)),
        (ATTENTION + FEED_FORWARD) + (2 * ATTENTION + FEED_FORWARD),
    ),
    # 9 - 3 + 1 = 7 places.
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), zeros((2, 4, 9)), 2 * 2 * 7 * 3 * 4 * 6),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), zeros((2, 4, 9, 8)), 2 * 2 * 7 * 6 * 9 * 4 * 6),
    "conv2d of one sample": (
        lambda: nn.Conv2d(4, 6, 3),
        zeros((4, 9, 8)),
        2 * 7 * 6 * 9 * 4 * 6,
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), zeros((1, 2, 4, 4, 4)), 2 * 27 * 8 * 2 * 3),
    "conv2d, strided and padded": (
        # (9 + 2 - 3) / 2 + 1 = 5 places on either side.
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
        zeros((1, 4, 9, 9)),
        2 * 25 * 9 * 4 * 6,
    ),
    "conv2d, dilated": (
        # The kernel spans 5: 9 - 5 + 1 = 5 places.
        lambda: nn.Conv2d(4, 6, 3, dilation=2),
        zeros((1, 4, 9, 9)),
        2 * 25 * 9 * 4 * 6,
    ),
    "conv2d in groups": (
        lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"),
        zeros((1, 4, 9, 9)),
        2 * 81 * 9 * 2 * 6,
    ),
    "conv2d by channel": (
        lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1),
        zeros((1, 4, 9, 9)),
        2 * 81 * 9 * 4,
    ),
    # A transposed convolution spreads every number of its input.
    "transposed conv1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2),
        zeros((2, 4, 9)),
        2 * 2 * 9 * 3 * 4 * 6,
    ),
    "transposed conv2d in groups": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, output_padding=1, stride=2),
        zeros((1, 4, 5, 5)),
        2 * 25 * 9 * 4 * 3,
    ),
    "transposed conv3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2),
        zeros((1, 2, 4, 4, 4)),
        2 * 64 * 8 * 2 * 3,
    ),
    # A bag is a row of a sparse matrix of weights times the table.
    "embedding bag": (lambda: nn.EmbeddingBag(10, 4), tokens(2, 3), 2 * 6 * 4),
    "embedding bag, weighted": (
        lambda: nn.EmbeddingBag(10, 4, mode="sum"),
        lambda: {
            "input": torch.zeros(2, 3, dtype=torch.int64),
            "per_sample_weights": torch.ones(2, 3),
        },
        2 * 6 * 4,
    ),
    "embedding bag, maximum": (lambda: nn.EmbeddingBag(10, 4, mode="max"), tokens(2, 3), 0),
    "embedding": (lambda: nn.Embedding(10, 4), tokens(2, 3), 0),
    "adaptive softmax": (
        # The head has 5 classes and 2 clusters; those project 8 to 4 and 8 to 2 first.
        lambda: AdaptiveScores(8, 20, [5, 10], div_value=2.0),
        zeros((3, 8)),
        2 * 3 * 8 * 7 + 2 * 3 * (8 * 4 + 4 * 5) + 2 * 3 * (8 * 2 + 2 * 10),
    ),
    "elementwise": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Upsample(8)),
        zeros((2, 4, 6, 6)),
        0,
    ),
}

SPARSE = torch.eye(3).to_sparse()

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], Any], int]] = {
    "matmul": (torch.matmul, zeros((2, 3, 4), (4, 5)), 2 * 2 * 3 * 4 * 5),
    "matmul of batches": (torch.matmul, zeros((2, 1, 3, 4), (6, 4, 5)), 2 * 12 * 3 * 4 * 5),
    "matrix and vector": (torch.matmul, zeros((3, 4), (4,)), 2 * 3 * 4),
    "vectors": (torch.matmul, zeros((4,), (4,)), 2 * 4),
    "bmm": (torch.bmm, zeros((2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "baddbmm": (torch.baddbmm, zeros((2, 3, 5), (2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "addmm": (torch.addmm, zeros((3, 5), (3, 4), (4, 5)), 2 * 3 * 4 * 5),
    "addmm in place": (Tensor.addmm_, zeros((3, 5), (3, 4), (4, 5)), 2 * 3 * 4 * 5),
    "addbmm": (torch.addbmm, zeros((3, 5), (2, 3, 4), (2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "addmv": (torch.addmv, zeros((3,), (3, 4), (4,)), 2 * 3 * 4),
    "addr": (torch.addr, zeros((3, 4), (3,), (4,)), 2 * 3 * 4),
    "einsum": (
        lambda q, k: torch.einsum("bthd,bshd->bhts", q, k),
        zeros((2, 7, 3, 4), (2, 5, 3, 4)),
        2 * 2 * 3 * 7 * 5 * 4,
    ),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, 2),
        zeros((2, 3, 4), (3, 4, 5)),
        2 * 2 * 12 * 5,
    ),
    "vmap": (
        lambda a, b: torch.vmap(torch.mv, (0, None))(b, a),
        zeros((4,), (2, 3, 4)),
        2 * 2 * 3 * 4,
    ),
    "scaled dot product attention": (
        F.scaled_dot_product_attention,
        zeros((2, 3, 7, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
        2 * 2 * 3 * 7 * 5 * (4 + 4),
    ),
    "causal attention": (
        # Half of it is masked; kernels differ in what they make of that, so all of it counts.
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        zeros((2, 3, 7, 4)),
        2 * 2 * 3 * 7 * 7 * (4 + 4),
    ),
    "attention with dropout": (
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        zeros((2, 3, 7, 4)),
        2 * 2 * 3 * 7 * 7 * (4 + 4),
    ),
    "grouped-query attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        zeros((2, 6, 7, 4), (2, 3, 5, 4)),
        2 * 2 * 6 * 7 * 5 * (4 + 4),
    ),
    "values of another width": (
        F.scaled_dot_product_attention,
        zeros((2, 3, 7, 4), (2, 3, 5, 4), (2, 3, 5, 8)),
        2 * 2 * 3 * 7 * 5 * (4 + 8),
    ),
    "sparse matrix": (
        lambda x: torch.sparse.mm(SPARSE, x) + SPARSE @ x + SPARSE.to_sparse_csr() @ x,
        zeros((3, 4)),
        3 * (2 * 3 * 4),
    ),
    "distances": (torch.cdist, zeros((2, 3, 4), (2, 5, 4)), 2 * 2 * 3 * 5 * 4),
    "distances of all pairs": (F.pdist, zeros((5, 4)), 2 * (5 * 4 // 2) * 4),
    "distances of many": (torch.cdist, zeros((30, 4), (40, 4)), 2 * 30 * 40 * 4),
    "fourier transform": (lambda x: torch.fft.fft(x + 0j), zeros((2, 8)), 2 * 5 * 8 * 3),
    "real fourier transform": (torch.fft.rfft, zeros((2, 8)), 2 * 5 * 8 * 3 // 2),
    "convolution over time": (
        torch.conv_tbc,
        zeros((9, 2, 4), (3, 4, 6), (6,)),
        2 * 2 * 7 * 3 * 4 * 6,
    ),
}


# PyTorch itself says so of the first such layer or matrix.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_count_what_one_finds_by_hand(name: str, is_training: bool) -> None:
    make, example, expected = LAYERS[name]
    module = make().train(is_training)
    count = count_flops(module, example())
    assert count.total == expected
    assert count.training == 3 * expected
    assert not count.uncounted
    assert module.training is is_training


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_count_what_one_finds_by_hand(name: str) -> None:
    function, example, expected = FUNCTIONS[name]
    with torch.inference_mode():
        quick = count_flops(Function(function), example())
    count = count_flops(Function(function), example())
    assert count.total == quick.total == expected
    assert not count.uncounted


@pytest.mark.parametrize("name", ["lstm, two layers both ways", "gru", "attention", "encoder"])
def test_what_has_no_numbers_counts_the_same(name: str) -> None:
    make, example, expected = LAYERS[name]
    inputs = tuple(tensor.to("meta") for tensor in example())
    assert count_flops(make().to("meta"), inputs).total == expected


def test_a_packed_sequence_counts_the_steps_that_are_there() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(7, 2, 3), [7, 4])
    expected = 2 * (7 + 4) * 4 * 5 * (3 + 5)
    assert count_flops(nn.LSTM(3, 5), (packed,)).total == expected


def test_fused_layers_called_by_name_count_as_the_layers_do() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True).eval()
    own, x = layer.self_attn, torch.zeros(1, 17, 12)

    def attend(x: Tensor) -> Any:
        return torch._native_multi_head_attention(
            *(x, x, x, 12, 2, own.in_proj_weight, own.in_proj_bias),
            *(own.out_proj.weight, own.out_proj.bias),
        )

    def whole(x: Tensor) -> Tensor:
        return torch._transformer_encoder_layer_fwd(
            *(x, 12, 2, own.in_proj_weight, own.in_proj_bias),
            *(own.out_proj.weight, own.out_proj.bias, False, False, 1e-5),
            *(layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias),
            *(layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias),
        )

    assert count_flops(Function(attend), x).total == ATTENTION
    assert count_flops(Function(whole), x).total == ATTENTION + FEED_FORWARD


def test_kernels_of_devices_count_as_those_of_the_cpu_do() -> None:
    aten, x = torch.ops.aten, torch.zeros(7, 2, 3)
    weights = [p.detach() for p in nn.LSTM(3, 5, proj_size=2).parameters()]
    expected = LAYERS["lstm with projection"][2]
    for kernel in (aten._cudnn_rnn, aten.miopen_rnn):
        formula = formula_of(kernel)
        assert formula is not None
        assert formula(x, weights, 5, None, x, x, out_val=None) == expected
    on_mps = formula_of(aten._lstm_mps)
    assert on_mps is not None
    assert on_mps(x, [x, x], weights, True, 1, out_val=None) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_count_the_same_on_a_gpu(name: str) -> None:
    make, example, expected = LAYERS[name]
    module, inputs = make().cuda(), example()
    if isinstance(inputs, dict):
        inputs = {key: value.cuda() for key, value in inputs.items()}
    else:
        inputs = tuple(tensor.cuda() for tensor in inputs)
    assert count_flops(module, inputs).total == expected


class Branched(nn.Module):
    """Calls one submodule twice, and does another's work itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.direct = nn.Linear(4, 3)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.blocks[0](x)
        return F.linear(self.blocks[1](x), self.direct.weight)


def test_every_submodule_has_its_own_count() -> None:
    count = count_flops(Branched(), torch.zeros(1, 4), {"times": 2})
    assert dict(count.by_module) == {
        "": 3 * 32 + 24,
        "blocks.0": 64,
        "blocks.0.0": 64,
        "blocks.1": 32,
        "blocks.1.0": 32,
    }
    assert count.by_module["direct"] == 0


def test_arguments_are_given_as_a_model_is_called() -> None:
    model, x = Branched(), torch.zeros(1, 4)
    given: list[Any] = [(x, 2), {"x": x, "times": 2}]
    assert {count_flops(model, example).total for example in given} == {120}


class Restless(nn.Module):
    """Draws numbers, and changes its buffers even in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = torch.rand(3)
        return self.body(x)


def test_counting_leaves_a_module_as_it_was() -> None:
    module, x = Restless(), torch.randn(2, 2, 4, 4)
    module(x).sum().backward()
    module.body[2].eval()
    before = copy.deepcopy(module)
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    buffers = dict(module.named_buffers())
    modes = [one.training for one in module.modules()]
    drawn = torch.get_rng_state()
    assert count_flops(module, x).total == 2 * 2 * 4 * 9 * 2 * 2
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [one.training for one in module.modules()] == modes
    for name, value in module.named_buffers():
        assert value is buffers[name]
        assert torch.equal(value, before.get_buffer(name))
    for now, then in zip(module.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, then)
    found = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, gradients))
    assert len(found) == len(gradients) == 4
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in module.modules()]
    assert not any(before or after for before, after in hooks)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_module_that_fails_leaves_nothing_behind() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count_flops(module, torch.zeros(1, 4))
    assert module.training
    assert torch.backends.mha.get_fastpath_enabled()
    assert not module[1]._forward_hooks
    assert count_flops(nn.Linear(4, 4), torch.zeros(1, 4)).total == 32


def test_what_is_scripted_counts_as_its_parent_s() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(scripted, nn.Linear(4, 4))
    assert dict(count_flops(model, torch.zeros(1, 4)).by_module) == {"": 64, "1": 32}


def test_loops_and_branches_count_what_they_run() -> None:
    w = torch.zeros(4, 4)

    def branch(x: Tensor) -> Any:
        return torch.cond(x.sum() >= 0, lambda x: x @ w, lambda x: x + 1, (x,))

    assert count_flops(Function(branch), torch.zeros(2, 4)).total == 2 * 2 * 4 * 4


def test_what_is_compiled_counts_as_what_it_was_made_of() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing needs to be compiled for a count")

    compiled: Any = torch.compile(nn.Linear(4, 4), backend=refuse)
    assert count_flops(compiled, torch.zeros(2, 4)).total == 2 * 2 * 4 * 4


def opaque(name: str, **options: Any) -> Any:
    """An operator of somebody's, of which nothing is known but its name."""

    def double(x: Tensor) -> Tensor:
        return x @ x.T

    return torch.library.custom_op(
        f"esper_tests::{name}", double, mutates_args=(), schema="(Tensor x) -> Tensor", **options
    )


class WithOwnKernel(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mixer = Function(kernel)

    def forward(self, x: Tensor) -> Any:
        return self.mixer(self.first(x))


def test_work_that_cannot_be_counted_is_named() -> None:
    model = WithOwnKernel(opaque("unknown"))
    with pytest.warns(EsperWarning, match=r"esper_tests::unknown in 'mixer' cannot be counted"):
        count = count_flops(model, torch.zeros(2, 4))
    assert count.total == 2 * 2 * 4 * 4
    assert count.uncounted == {"esper_tests::unknown": "mixer"}


def test_work_of_torch_without_a_formula_is_named_too() -> None:
    with pytest.warns(EsperWarning, match="aten::linalg_inv_ex cannot be counted"):
        count = count_flops(Function(torch.linalg.inv), torch.eye(3))
    assert count.uncounted == {"aten::linalg_inv_ex": ""}


def test_nested_tensors_are_named_not_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)], layout=torch.jagged)
    with pytest.warns(EsperWarning, match="aten::linear cannot be counted"):
        count_flops(nn.Linear(4, 5), nested)


def test_a_formula_that_somebody_registers_counts() -> None:
    kernel = opaque("known")
    packet = torch.ops.esper_tests.known
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    @register_flop_formula(packet)
    def formula(x: Any, *_: Any, **__: Any) -> int:
        return int(2 * x[0] * x[0] * x[1])

    try:
        count = count_flops(WithOwnKernel(kernel), torch.zeros(2, 4))
    finally:
        del flop_registry[packet]
    assert count.by_module["mixer"] == 2 * 2 * 2 * 4
    assert not count.uncounted
