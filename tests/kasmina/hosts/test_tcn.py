"""The causal convolutional network: size, slots, how far it sees, and growing deeper by copies."""

from __future__ import annotations

import pytest
import torch

from esper.kasmina.flops import count_flops
from esper.kasmina.hosts import TcnConfig, TcnHost
from esper.leyline.errors import ConfigError
from esper.testing import check_host
from tests.kasmina.gardens import assert_copies_train

SMALL = TcnConfig(vocab=20, dim=8, layers=2, segments=2)


def test_parameter_counts() -> None:
    def count(config: TcnConfig) -> int:
        return sum(p.numel() for p in TcnHost(config).parameters())

    block = 2 * 16 + 2 * (3 * 8 * 8 + 8)
    # Tokens 160, norm 16, classifier 180.
    assert count(SMALL) == 2 * block + 160 + 16 + 180
    assert count(SMALL.replace(layers=6)) - count(SMALL) == 4 * block


def test_operations_by_hand() -> None:
    tokens = torch.zeros(1, 12, dtype=torch.long)
    convolutions = 2 * 2 * 12 * (3 * 8) * 8
    classifier = 2 * 12 * 8 * 20
    assert count_flops(TcnHost(SMALL), tokens).total == 2 * convolutions + classifier


def test_a_slot_follows_every_segment() -> None:
    host = TcnHost(SMALL.replace(layers=6, segments=2))
    assert host.slot_paths == {"r0c0": "segments.0", "r0c1": "segments.1"}
    assert [len(segment) for segment in host.segments] == [3, 3]
    assert TcnHost(SMALL.replace(slots=("r0c1",))).slot_paths == {"r0c1": "segments.1"}
    with pytest.raises(ConfigError, match="segments must divide layers"):
        SMALL.replace(layers=3)


@pytest.mark.parametrize(("layers", "segments", "kernel"), [(1, 1, 1), (2, 1, 2), (4, 2, 3)])
def test_contract(layers: int, segments: int, kernel: int) -> None:
    config = SMALL.replace(layers=layers, segments=segments, kernel_size=kernel)
    check_host("tcn", config, torch.randint(20, (2, 12)))


@pytest.mark.parametrize(("layers", "kernel"), [(1, 2), (2, 2), (1, 3), (4, 3)])
def test_every_block_sees_a_few_more_tokens_back(layers: int, kernel: int) -> None:
    host = TcnHost(SMALL.replace(layers=layers, segments=1, kernel_size=kernel)).double()
    back = layers * 2 * (kernel - 1)
    hidden = torch.randn(1, 32, 8, dtype=torch.float64)
    other = hidden.clone()
    other[:, 3] = torch.randn(8)
    with torch.no_grad():
        changed = (host.segments[0](hidden) - host.segments[0](other)).abs().amax((0, 2)) > 0
    assert changed.nonzero().flatten().tolist() == list(range(3, 4 + back)), "and none ahead"


def test_copies_grow_deeper_and_train() -> None:
    class Pooled(TcnHost):
        """Scores of a whole sequence."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            """Return the mean over its tokens."""
            return super().forward(tokens).mean(1)

    host = Pooled(SMALL.replace(segments=1))
    assert_copies_train(host, "segments.0", torch.randint(20, (6, 12)), learning_rate=0.1)
