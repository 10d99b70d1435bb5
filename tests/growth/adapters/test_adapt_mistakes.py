"""Arguments of Adapt that do not fit, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import esper
from esper.growth.adapters.adapt import Adapt
from esper.growth.adapters.placement import AdaptConfig
from esper.leyline.errors import SlotError, UsageError
from tests.growth.adapters.test_adapt import make
from tests.growth.adapters.test_peft import lora

MODEL = make()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"targets": []}, "targets= is empty; name modules to adapt, or leave it out"),
        ({"targets": 5}, r"targets= takes names of modules, got int; write targets=\['\.\.\.'\]$"),
        ({"targets": None}, "got NoneType"),
        ({"targets": ["head", 5]}, "targets= takes names of modules, got int"),
        ({"targets": MODEL.wide}, "got Linear; write targets='wide'$"),
        ({"targets": "hed"}, r"names 'hed', which matches no weight, did you mean 'head'\?$"),
        ({"targets": "atn.out_proj"}, "mean 'out_proj' or 'attention.self_attn.out_proj'"),
        ({"trainable": MODEL.head}, "got Linear; write trainable='head'$"),
        ({"trainable": [MODEL.head]}, "got Linear; write trainable='head'$"),
        ({"trainable": None}, "trainable= takes names of modules, got NoneType"),
        ({"trainable": ""}, "trainable= names '', no module of the model"),
        ({"trainable": "linear1"}, "no module of the model, did you mean 'attention.linear1'"),
        ({"trainable": "xx"}, r"known: conv, attention, wide, head, .*, … \(13 in all\)$"),
    ],
)
def test_names_that_are_none_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        Adapt(MODEL, 500, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["budget", "rank", "targets", "trainable"])
def test_what_a_configuration_of_peft_says_is_not_said_twice(name: str) -> None:
    with pytest.raises(UsageError, match=f"from_peft takes {name}= from the LoraConfig; leave"):
        Adapt.from_peft(make(), lora(target_modules=["wide"]), **{name: 5})
    with pytest.raises(UsageError, match="config must be an AdaptConfig, got a dict"):
        Adapt.from_peft(make(), lora(target_modules=["wide"]), config={"stay": 2.0})
    config = AdaptConfig(stay=2.0)
    adapters = Adapt.from_peft(make(), lora(target_modules=["wide"]), config=config)
    assert adapters.config == config.replace(scale=2.0)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("change", "told", "undo"),
    [
        (nn.utils.weight_norm, "weight_norm computes it; call torch", "remove_weight_norm"),
        (nn.utils.spectral_norm, "spectral_norm computes it; call torch", "remove_spectral_norm"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "it is pruned", "remove"),
    ],
)
def test_weights_that_a_hook_computes_are_not_called_quantised(
    change: Any, told: str, undo: str
) -> None:
    model = make()
    change(model.wide)
    with pytest.raises(UsageError, match=rf"wide\.weight cannot be adapted: {told}.*{undo}"):
        Adapt(model, 500, targets="wide")
    if undo == "remove":
        prune.remove(model.wide, "weight")
    else:
        getattr(nn.utils, undo)(model.wide)
    assert list(Adapt(model, 500, targets="wide").ranks) == ["wide.weight"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_model_is_refused_by_the_line_that_works() -> None:
    model = torch.compile(make())
    with pytest.raises(UsageError, match=r"write Adapt\(model\._orig_mod, \.\.\.\) first and comp"):
        Adapt(model, 500)
    Adapt(model._orig_mod, 500)


def test_a_model_with_adapters_is_baked_before_it_grows() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    adapters = Adapt(model, rank=1)
    data = [(torch.randn(8, 6), torch.arange(8) % 2)]
    words = r"has adapters of esper\.Adapt.*; call adapters\.bake\(\)"
    for slots in ("auto", ["1"]):
        with pytest.raises(SlotError, match=words):
            esper.grow(model, slots, train=data, val=data, epochs=2)
    with pytest.raises(SlotError, match=words):
        esper.Garden(model, ["1"], data[0][0])
    adapters.bake()
    assert list(esper.suggest_slots(model, data[0][0])) == ["1", "3"]
