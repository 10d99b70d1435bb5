"""Adapters and PEFT: files it loads, its configurations, models that it wraps, equal training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.adapters.adapt import Adapt
from esper.leyline.errors import UsageError


class Net(nn.Module):
    """A convolution and two linear layers, whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.up = nn.Linear(6, 30)
        self.inner = nn.ModuleDict({"up": nn.Linear(30, 30)})
        self.head = nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.conv(x).mean((2, 3)))
        return self.head(F.relu(self.inner["up"](F.relu(x))))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def train(
    model: nn.Module, optimizer: Any, steps: int, adapters: Adapt | None = None
) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if adapters is not None:
            adapters.step(optimizer)
        losses.append(float(loss.detach()))
    return losses


def trained(model: nn.Module, **options: Any) -> Adapt:
    adapters = Adapt(model, total_steps=30, **options)
    train(model, torch.optim.AdamW(adapters.parameters(), lr=0.01), 30, adapters)
    return adapters


def lora(**fields: Any) -> Any:
    """Return something with the fields of a LoraConfig that are read."""
    usual = {"r": 2, "lora_alpha": 4, "target_modules": ["up"], "modules_to_save": None}
    return SimpleNamespace(**{"peft_type": "LORA", **usual, **fields})


def test_a_configuration_says_where_and_how_much() -> None:
    model = make()
    adapters = Adapt.from_peft(model, lora(modules_to_save=["head"]))
    assert list(adapters.ranks) == ["up.weight", "inner.up.weight"]
    assert adapters.budget == 2 * (36 + 60)
    assert adapters.config.scale == 2.0
    assert model.head.weight.requires_grad
    only = Adapt.from_peft(make(), lora(target_modules=r"inner\.up", init_lora_weights=True))
    assert list(only.ranks) == ["inner.up.weight"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (lora(use_dora=True), "use_dora=True"),
        (lora(lora_dropout=0.1), "lora_dropout=0.1"),
        (lora(init_lora_weights="olora"), "init_lora_weights='olora'"),
        (lora(init_lora_weights=False), "init_lora_weights=False"),
        (lora(target_modules=None), "target_modules"),
        (lora(target_modules=["tail"]), "tail.* known: .*head"),
        (lora(peft_type="IA3"), "takes a LoraConfig"),
    ],
)
def test_configurations_that_cannot_be_followed_are_refused(config: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Adapt.from_peft(make(), config)


def test_files_have_the_rank_of_every_layer(tmp_path: Path) -> None:
    model = make()
    adapters = trained(model, budget=300, trainable="head")
    adapters.save_pretrained(tmp_path / "new" / "adapter")
    config = json.loads((tmp_path / "new" / "adapter" / "adapter_config.json").read_text("utf-8"))
    ranks = {
        name.removesuffix(".weight"): one.pair.rank + one.pair.settled
        for name, one in adapters.weights.items()
        if one.pair.rank
    }
    assert config["rank_pattern"] == {f"^{n}".replace(".", r"\."): r for n, r in ranks.items()}
    assert config["modules_to_save"] == ["head"]


def test_what_peft_cannot_load_is_refused(tmp_path: Path) -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(UsageError, match=r"0\.weight \(convolutions in groups\)"):
        Adapt(grouped, rank=1).save_pretrained(tmp_path)
    attention = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8))
    with pytest.raises(UsageError, match=r"nn\.MultiheadAttention"):
        Adapt(attention, rank=1).save_pretrained(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file; give a folder"):
        Adapt(make(), rank=1).save_pretrained(tmp_path / "file")
    with pytest.raises(UsageError, match="no rank is placed yet"):
        Adapt(nn.Sequential(nn.Linear(40, 40)), 500).save_pretrained(tmp_path)


# ---- With PEFT itself


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="needs the extra esper-grow[peft]")


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_and_merges_what_was_saved(peft: Any, tmp_path: Path) -> None:
    model = make()
    adapters = trained(model, budget=300, trainable="head")
    adapters.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    torch.testing.assert_close(loaded(X), model(X))
    torch.testing.assert_close(loaded.merge_and_unload()(X), adapters.bake()(X))


class Normed(nn.Module):
    """A head with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 30)
        self.head = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(x.flatten(1))))


def test_files_have_the_running_statistics_of_trained_modules(tmp_path: Path) -> None:
    model = Normed()
    trained(model, budget=300, trainable="head").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for name, buffer in model.head.named_buffers(prefix="base_model.model.head"):
        assert torch.equal(saved[name], buffer)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_a_head_with_running_statistics(peft: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Normed()
    base = copy.deepcopy(model)
    trained(model, budget=300, trainable="head").save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(loaded.eval()(X), model.eval()(X))


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainable", [(), ("lm_head", "transformer.wte")])
def test_peft_loads_an_adapter_of_gpt2(
    peft: Any, tmp_path: Path, trainable: tuple[str, ...]
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    base = copy.deepcopy(model)
    with pytest.raises(UsageError, match=r"lm_head\.weight is tied to transformer\.wte\.weight"):
        Adapt(model, 2_000, trainable="lm_head")
    adapters = Adapt(model, 2_000, total_steps=12, trainable=trainable)
    assert "lm_head.weight" not in adapters.ranks
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=0.01)
    tokens = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(12):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        adapters.step(optimizer)
    adapters.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    assert not torch.allclose(loaded.unload()(tokens).logits, model(tokens).logits)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_a_uniform_rank_trains_as_lora_of_peft(peft: Any) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["conv", "up"])
    wrapped = peft.get_peft_model(make(), config)
    own = make()
    adapters = Adapt(own, rank=2, targets=["conv", "up"])
    with torch.no_grad():
        for name, one in adapters.weights.items():
            layer = wrapped.base_model.model.get_submodule(name.removesuffix(".weight"))
            one.pair.A.copy_(layer.lora_A["default"].weight.flatten(1))
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    assert sum(p.numel() for p in parameters) == adapters.count_parameters()
    theirs = train(wrapped, torch.optim.AdamW(parameters, lr=0.01), 20)
    ours = train(own, torch.optim.AdamW(adapters.parameters(), lr=0.01), 20, adapters)
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_a_real_configuration_is_followed(peft: Any) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["up"], modules_to_save=["head"])
    adapters = Adapt.from_peft(make(), config)
    assert (adapters.budget, adapters.config.scale) == (4 * (36 + 60), 2.0)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_weights_that_peft_adapts_are_left_to_it(peft: Any, tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["up"]))
    theirs = [p for p in wrapped.parameters() if p.requires_grad]
    adapters = Adapt(wrapped, rank=1)
    assert [name.rpartition(".model.")[2] for name in adapters.ranks] == [
        "conv.weight",
        "head.weight",
    ]
    assert all(p.requires_grad for p in theirs)
    optimizer = torch.optim.AdamW([*theirs, *adapters.parameters()], lr=0.01)
    losses = train(wrapped, optimizer, 20, adapters)
    assert losses[-1] < losses[0]
    # Each is saved by its own; PEFT loads both beside each other.
    wrapped.save_pretrained(tmp_path / "theirs")
    adapters.save_pretrained(tmp_path / "ours")
    both = peft.PeftModel.from_pretrained(make(), tmp_path / "theirs")
    assert not torch.allclose(both(X), wrapped(X))
    both.load_adapter(tmp_path / "ours", "ours")
    both.base_model.set_adapter(["default", "ours"])
    torch.testing.assert_close(both(X), wrapped(X))
