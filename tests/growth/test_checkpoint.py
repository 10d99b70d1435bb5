from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import esper
from esper.growth.checkpoint import Rewarm, _deeper
from esper.growth.depth.rules import DeepenConfig
from esper.growth.grown import Grown
from esper.leyline.errors import UsageError
from tests.growth.depth.models import make_gpt, tokens
from tests.plots import GROW_ONE, SLOTS, Script, growth_config, make_batches, make_net

pytestmark = pytest.mark.filterwarnings(
    "ignore:A static network of the same size", "ignore:.*still being blended in"
)

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def grow(model: Any, slots: Any = SLOTS, **changes: Any) -> Grown:
    options: dict[str, Any] = {
        "train": make_batches(),
        "val": make_batches(2, 32, seed=9),
        "epochs": 9,
        "controller": Script(GROW_ONE),
        "config": growth_config(1),
        "keep": "last",
        **changes,
    }
    return esper.grow(model, slots, **options)


def unchanged(model: Any, **changes: Any) -> Grown:
    """Grow nothing, by steps that change nothing."""
    still = partial(torch.optim.SGD, lr=0.0)
    return grow(model, epochs=1, controller="wait", optimizer=still, **changes)


def language(model: Any, **changes: Any) -> Grown:
    batches = [(each[:, :-1], each[:, 1:]) for each in map(tokens, range(4))]
    options: dict[str, Any] = {
        "train": batches,
        "val": batches[:1],
        "epochs": 5,
        "loss": "language",
        "optimizer": torch.optim.AdamW,
        "keep": "last",
        **changes,
    }
    return esper.grow(model, **options)


def test_a_grown_network_grows_on_from_its_folder(tmp_path: Path) -> None:
    first = grow(make_net(), out=tmp_path / "run")
    first.save(tmp_path / "saved")
    # The finished network, the best so far of a run that is not, and a folder of its own.
    (tmp_path / "going" / "checkpoints").mkdir(parents=True)
    first.save(tmp_path / "going" / "checkpoints" / "best")
    for folder in ("saved", "run", "going"):
        again = unchanged(make_net(7), checkpoint=tmp_path / folder)
        assert again.summary.parameters_before == first.summary.parameters_after
        torch.testing.assert_close(again.model(X), first.model(X))
    more = grow(make_net(7), checkpoint=tmp_path / "saved")
    assert more.summary.parameters_after > first.summary.parameters_after


def test_a_frozen_network_is_widened_by_adapters(tmp_path: Path) -> None:
    """Nothing of the finished network changes, not even the seeds that it came with."""
    first = grow(make_net())
    first.save(tmp_path / "saved")
    finished = dict(first.bake().named_parameters())
    train, val = ([(x, (y + 1) % 3) for x, y in make_batches(*size)] for size in ((4,), (2, 32, 9)))
    wide = grow(
        make_net(7).requires_grad_(False),
        checkpoint=tmp_path / "saved",
        controller="trial",
        train=train,
        val=val,
        optimizer=partial(torch.optim.AdamW, lr=0.03),
    )
    assert wide.summary.parameters_before == 0 < wide.summary.parameters_after
    assert not torch.allclose(wide.model(X), first.model(X))
    kept = dict(wide.bake().named_parameters())
    assert all(torch.equal(kept[name], value) for name, value in finished.items())
    germinated = [one.decision for one in wide.history if one.decision and one.decision.blueprint]
    assert {decision.tempo for decision in germinated} == {0}


def test_seeds_make_another_object_of_it_that_no_optimizer_knows(tmp_path: Path) -> None:
    grow(make_net()).save(tmp_path / "saved")
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"write optimizer=partial"):
        grow(model, checkpoint=tmp_path / "saved", optimizer=optimizer)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_plain_weights_are_loaded_into_the_model(ending: str, tmp_path: Path) -> None:
    path, trained, model = tmp_path / f"net.{ending}", make_net(3), make_net()
    if ending == "pt":
        torch.save(trained.state_dict(), path)
    else:
        save_file(trained.state_dict(), path)
    grown = unchanged(model, checkpoint=str(path))
    assert grown.model.model is model
    assert torch.equal(model(X), trained(X))


def test_a_deepened_network_is_deepened_further(tmp_path: Path) -> None:
    small = language(make_gpt(2), deepen={"start": 1, "at": {0.4: 2}})
    small.save(tmp_path / "two")
    torch.save(small.model.state_dict(), tmp_path / "two.pt")
    for name in ("two", "two.pt"):
        deep = language(make_gpt(4), checkpoint=tmp_path / name, deepen={"at": {0.4: 4}})
        depths = [record.depth.awake for record in deep.history if record.depth is not None]
        assert depths[0] == {"blocks": 2}
        assert depths[-1] == {"blocks": 4}
        assert deep.history[0].val_loss < language(make_gpt(4), deepen=True).history[0].val_loss


def test_a_network_whose_blocks_the_checkpoint_all_has_is_not_deepened(tmp_path: Path) -> None:
    torch.save(make_gpt(2).state_dict(), tmp_path / "two.pt")
    words = "the weights have all 2 blocks of the model, so none is left to wake; .* such as 4"
    for deepen in (True, {"at": {0.4: 2}}):
        with pytest.raises(UsageError, match=words):
            language(make_gpt(2), checkpoint=tmp_path / "two.pt", deepen=deepen)


def test_what_hugging_face_saved_says_what_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    config = transformers.GPT2Config(n_layer=2, use_cache=False, **shape)
    finished = transformers.GPT2LMHeadModel(config)
    finished.save_pretrained(tmp_path / "two")
    batches = [{"input_ids": each, "labels": each} for each in (tokens(n) % 11 for n in range(4))]
    data: dict[str, Any] = {"train": batches, "val": batches[:1], "loss": None}

    same = language(tmp_path / "two", epochs=1, controller="wait", **data)
    assert type(same.model.model) is type(finished)
    deep = language(str(tmp_path / "two"), deepen=True, **data)
    assert deep.model.config.n_layer == 4
    first = deep.history[0].depth
    assert first is not None
    assert first.awake == {"transformer.h": 2}
    three = language(tmp_path / "two", deepen={"at": {0.4: 3}}, **data)
    assert len(three.model.transformer.h) == 3
    given = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, **shape))
    deep = language(given, checkpoint=tmp_path / "two", deepen={"at": {0.4: 4}}, **data)
    assert deep.model is given
    half = (tmp_path / "two" / "model.safetensors").read_bytes()[:500]
    for name, content, match in (
        ("model.safetensors", half, "cannot be loaded as a GPT2LMHeadModel: .*save_pretrained"),
        ("config.json", b'{"archi', r"config\.json is damaged .*save_pretrained"),
    ):
        shutil.copytree(tmp_path / "two", tmp_path / name)
        (tmp_path / name / name).write_bytes(content)
        with pytest.raises(UsageError, match=match):
            language(tmp_path / name, epochs=1, controller="wait", **data)
    words = r"two has 2 blocks, and deepen wakes 1 at most; .* deepen=\{'at': \{0\.2: 4\}\}"
    with pytest.raises(UsageError, match=words):
        language(tmp_path / "two", deepen={"at": {0.2: 1}}, **data)
    with pytest.raises(UsageError, match=r"do not fit the model: .*or write deepen="):
        language(given, checkpoint=tmp_path / "two", epochs=1, controller="wait", **data)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_schedule_with_fewer_blocks_than_the_checkpoint_is_refused(blocks: int) -> None:
    config = SimpleNamespace(num_hidden_layers=2)
    deepen = DeepenConfig.of({"at": {0.2: blocks}})
    words = rf"^two has 2 blocks, and deepen wakes {blocks} at most; name more .*\{{0\.2: 4\}}\}}$"
    with pytest.raises(UsageError, match=words):
        _deeper(nn.Module, config, deepen, Path("two"))


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(make_net().state_dict(), "net.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"architectures": ["Nothing"]}')
    grow(make_net()).save(tmp_path / "seeds")

    def refused(match: str, model: Any, **changes: Any) -> None:
        with pytest.raises(UsageError, match=match):
            grow(model, **changes)

    refused("there is no checkpoint lost", "lost")
    refused(r"write esper\.grow\(model, checkpoint='net\.pt'\)", "net.pt")
    refused(r"write esper\.grow\(model, checkpoint='seeds'\)", Path("seeds"))
    refused("give the model as an nn.Module", "net.pt", checkpoint="net.pt")
    refused("empty is no checkpoint that Esper can read", make_net(), checkpoint="empty")
    refused(r"PEFT adapter.*merge_and_unload", "adapters")
    refused("names no architecture|pip install 'esper-grow", "foreign")
    other = nn.Sequential(nn.Linear(4, 3))
    refused("net.pt do not fit the model", other, checkpoint="net.pt", slots=["0"])
    weights = make_net().state_dict()
    name = next(iter(weights))
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").touch()
    half = (tmp_path / "net.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(half[: len(half) // 2])
    for broken in ("text.pt", "empty.pt", "half.pt"):
        size = (tmp_path / broken).stat().st_size
        words = rf"{broken} is damaged or holds no weights \(its {size:,} bytes cannot be read\); "
        refused(words, make_net(), checkpoint=broken)
    for content, match in (
        (make_net(), r"holds a .*Net, and only weights are read; write torch\.save"),
        ({"model": weights, "epoch": 3}, "mapping of 'model', 'epoch', not a state_dict; write"),
        (
            {"other": weights[name]},
            r"1 are not the model's \(first other\); give a model of the same",
        ),
        ({f"module.{each}": value for each, value in weights.items()}, "puts 'module.' before"),
        ({**weights, "stem.grown.seed": weights[name]}, "so give the folder of grown.save"),
        ({**weights, name: torch.zeros(7)}, rf"1 have another shape \(first {name}, \[7\] instead"),
        (
            dict(list(weights.items())[1:]),
            rf"1 of the model's are not there \(first {name}\); .*deep",
        ),
    ):
        torch.save(content, "other.pt")
        refused(match, make_net(), checkpoint="other.pt")
    for rewarm, match in (
        (1.5, "neither a share of the run"),
        (1.0, r"neither a share of the run, below 1, .*write rewarm=0\.05 or rewarm=1$"),
        (200.0, r"write rewarm=0\.05 or rewarm=200$"),
        (9999, "more than the .* of the"),
    ):
        refused(match, make_net(), checkpoint="net.pt", rewarm=rewarm)
    refused("the model does not match", other, checkpoint="seeds", slots=["0"])
    with pytest.raises(UsageError, match="deepen already names weights"):
        language(make_gpt(), checkpoint="net.pt", deepen={"weights": "net.pt"})
    with pytest.raises(UsageError, match="has seeds"):
        language(make_gpt(), checkpoint="seeds", deepen=True)


# ---- Learning rates that rise anew


class Watched(torch.optim.SGD):
    """Notes the rate of every step."""

    rates: list[float]

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.rates = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def rates_of(**changes: Any) -> list[float]:
    model = make_net()
    optimizer = Watched(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    grow(
        model,
        controller="wait",
        epochs=5,
        optimizer=optimizer,
        scheduler=schedule,
        scheduler_every="batch",
        **changes,
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**20)
    return optimizer.rates


def test_rates_rise_anew_and_schedules_know_nothing_of_it(tmp_path: Path) -> None:
    # Four batches in each of five epochs.
    plain = [0.5 * 0.9**step for step in range(20)]
    assert rates_of() == pytest.approx(plain)
    warm = [min(1.0, (step + 1) / 6) * rate for step, rate in enumerate(plain)]
    assert rates_of(rewarm=5) == pytest.approx(warm)
    assert rates_of(rewarm=0.25) == pytest.approx(warm)
    torch.save(make_net().state_dict(), tmp_path / "net.pt")
    # 5 % of the run by default: one step.
    by_default = [0.5 * plain[0], *plain[1:]]
    assert rates_of(checkpoint=tmp_path / "net.pt") == pytest.approx(by_default)
    assert rates_of(checkpoint=tmp_path / "net.pt", rewarm=0) == pytest.approx(plain)


def test_a_run_is_resumed_with_its_checkpoint(tmp_path: Path) -> None:
    torch.save(make_net(3).state_dict(), tmp_path / "net.pt")
    options = {"checkpoint": tmp_path / "net.pt", "rewarm": 12, "controller": "wait"}
    whole = grow(make_net(), **options)
    part = grow(make_net(), epochs=3, out=tmp_path / "run", **options)
    assert "checkpoint: " in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    rest = grow(make_net(), out=tmp_path / "run", resume=True, **options)
    assert (len(part.history), len(rest.history)) == (3, 9)
    assert [one.val_loss for one in rest.history] == [one.val_loss for one in whole.history]
    assert torch.equal(rest.model(X), whole.model(X))


def test_the_twin_is_warmed_alike() -> None:
    plain, warm = (grow(make_net(), twin=True, rewarm=rewarm) for rewarm in (0, 30))
    assert warm.history[0].val_loss != plain.history[0].val_loss
    assert warm.history[-1].twin_score is not None
    assert warm.history[0].val_score == warm.history[0].twin_score


def test_a_run_that_goes_on_warms_on() -> None:
    rewarm = Rewarm.of(10, make_batches(), epochs=5)
    assert rewarm is not None
    rewarm.at(1, 0)
    assert rewarm.factor == pytest.approx(1 / 11)
    rewarm.at(3, 1)
    assert rewarm.factor == pytest.approx(10 / 11)
    rewarm.at(4, 0)
    assert rewarm.factor == 1.0
    with pytest.raises(UsageError, match="train has no length"):
        Rewarm.of(10, iter(make_batches()), epochs=5)
