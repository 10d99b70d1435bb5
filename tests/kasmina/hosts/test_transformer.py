"""The sequence host: size, slots, causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from esper.kasmina.hosts import TransformerConfig, TransformerHost
from esper.leyline.errors import ConfigError, UsageError
from esper.testing import check_host

SMALL = TransformerConfig(vocab=17, dim=16, heads=2, layers=4, context=12, segments=2)


def test_parameter_count_of_the_documents() -> None:
    with torch.device("meta"):
        host = TransformerHost(TransformerConfig())
    assert sum(p.numel() for p in host.parameters()) == 30_044_544


def test_slots_follow_the_last_layer_of_each_segment() -> None:
    with torch.device("meta"):
        host = TransformerHost(TransformerConfig())
    assert host.slot_paths == {"r0c0": "layers.1", "r0c1": "layers.3", "r0c2": "layers.5"}


def test_contract() -> None:
    check_host("transformer", SMALL, torch.arange(24).reshape(2, 12) % 17)


def test_the_head_is_tied_to_the_embedding() -> None:
    host = TransformerHost(SMALL)
    assert not any(
        module.out_features == 17 for module in host.modules() if type(module) is nn.Linear
    )
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    before = host(tokens)
    with torch.no_grad():
        host.tokens.weight[5] *= 2.0  # a token that is not in the input: only its score doubles
    ratio = host(tokens) / before
    assert torch.allclose(ratio[..., 5], torch.tensor(2.0), atol=1e-4)
    assert torch.allclose(ratio[..., :5], torch.tensor(1.0), atol=1e-4)


def test_no_token_sees_the_future() -> None:
    host = TransformerHost(SMALL)
    tokens = torch.randint(0, 17, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    difference = (host(tokens) - host(changed)).abs().amax(dim=(0, 2))
    assert bool((difference[:7] == 0).all())
    assert bool((difference[7:] > 0).all())


def test_starts_near_uniform() -> None:
    scores = TransformerHost(SMALL)(torch.randint(0, 17, (4, 12)))
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), torch.randint(0, 17, (48,)))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(17.0)).item(), abs=0.1)


def test_training_draws_no_random_numbers_without_dropout() -> None:
    host = TransformerHost(SMALL).train()
    tokens = torch.randint(0, 17, (2, 12))
    state = torch.get_rng_state()
    first = host(tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(host(tokens), first)
    noisy = TransformerHost(SMALL.replace(dropout=0.5)).train()
    assert not torch.equal(noisy(tokens), noisy(tokens))


def test_a_long_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match="13 tokens does not fit the host's context of 12"):
        TransformerHost(SMALL)(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 5}, "must divide dim"),
        ({"segments": 4}, "must divide layers"),
        ({"dropout": 1.0}, "at most 0.9"),
        ({"slots": ("r0c3",)}, "has only r0c0, r0c1, r0c2"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransformerConfig(**options)
