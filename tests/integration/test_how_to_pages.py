"""The how-to pages about growing and training keep their word: their code runs.

Pages take some names for granted, which are given here; those about plug-ins are run beside the
tests of what they add.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import esper
from benchmarks._pages import DOCS, python_blocks, run_blocks
from tests.growth.depth.models import make_gpt, tokens
from tests.plots import GROW_ONE, SLOTS, Script, growth_config, make_batches, make_net

HOW_TO = DOCS / "how-to"
ELSEWHERE = {
    "add-a-blueprint": "tests/kasmina/blueprints/test_init.py",
    "add-a-controller": "tests/tamiyo/controllers/test_init.py",
    "add-a-host": "tests/kasmina/hosts/test_registry.py",
    "add-a-reward": "tests/simic/rewards/test_contract.py",
    "add-a-task": "tests/lab/tasks/test_task_registry.py",
}
HERE = {
    "adapt-a-finished-model",
    "choose-slots",
    "deepen",
    "environments",
    "grow-your-own",
    "other-loops",
    "train-a-controller",
}


class Classifier(nn.Module):
    """Which of three kinds a sequence of tokens is, by two layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(tokens).transpose(0, 1)).mean(0))
        return scores


def taken_for_granted() -> dict[str, Any]:
    torch.manual_seed(0)
    batch = (torch.randint(5, (8, 4)), torch.randint(3, (8,)))
    model, slots = Classifier(), ["encoder.layers.0"]
    return {
        "esper": esper,
        "torch": torch,
        "DistributedDataParallel": DistributedDataParallel,
        "model": model,
        "slots": slots,
        "example": batch[0],
        "example_input": batch[0],
        "train": [batch],
        "val": [batch],
    }


def test_every_page_with_code_is_run() -> None:
    pages = {path.stem for path in HOW_TO.glob("*.md") if python_blocks(path)}
    assert pages == HERE | set(ELSEWHERE)
    for page, test in ELSEWHERE.items():
        assert f"{page}.md" in (DOCS.parent / test).read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::esper.EsperWarning")
def test_choosing_slots_prints_what_the_page_says() -> None:
    asking, rehearsing = python_blocks(HOW_TO / "choose-slots.md")
    shorter = asking.replace("found, train=train", "found, epochs=8, train=train")
    names, said = run_blocks([shorter], taken_for_granted())
    # Growing has changed that model.
    said += run_blocks([rehearsing], {**taken_for_granted(), "found": names["found"]})[1]
    told = [line[2:] for line in (asking + rehearsing).splitlines() if line.startswith("# ")]
    assert len(told) == 5
    assert [line for line in told if line not in said.splitlines()] == []


@pytest.mark.filterwarnings("ignore::esper.EsperWarning")
def test_growing_with_an_optimizer_and_of_a_frozen_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(HOW_TO / "grow-your-own.md")
    optimizing, adapting, learned, copying, counting, spending, stopping, *rest = blocks
    looking, going_on, comparing = rest
    names = run_blocks([optimizing.replace("60", "8")], taken_for_granted())[0]
    assert names["schedule"].last_epoch == 8
    names = run_blocks([adapting.replace("val=val", "val=val, epochs=8")], taken_for_granted())[0]
    assert not any(parameter.requires_grad for parameter in names["model"].parameters())
    names = run_blocks([learned.replace("60", "8")], taken_for_granted())[0]
    garden, host = names["grown"].model, names["grown"].summary.parameters_before
    assert garden.param_limit == 2 * host
    grown = run_blocks([copying.replace("60", "8")], taken_for_granted())[0]["grown"]
    assert [slot.blueprint for slot in grown.history[-1].slots] == ["kin"] * 2
    count = run_blocks([counting], taken_for_granted())[0]["count"]
    assert 0 < 2 * count.by_module["encoder.layers.0"] < count.total < count.training
    spent = run_blocks([spending.replace("60", "8")], taken_for_granted())[0]["grown"].summary
    assert 0 < spent.training_flops <= spent.compute_budget
    at_once = stopping.replace("> 99", ">= 0")
    names = run_blocks([at_once], taken_for_granted())[0]
    assert len(names["grown"].history) == 1
    grown = esper.grow(
        make_net(),
        SLOTS,
        train=make_batches(),
        val=make_batches(2, 32, seed=9),
        epochs=9,
        controller=Script(GROW_ONE),
        config=growth_config(1),
        keep="last",
    )
    if importlib.util.find_spec("polars") is None:
        looking = "\n".join(line for line in looking.splitlines() if "to_polars" not in line)
    said = run_blocks([looking, comparing], {"grown": grown})[1]
    data = {"train": make_batches(), "val": make_batches(2, 32, seed=9), "slots": SLOTS}
    known = {"esper": esper, "grown": grown, "make_model": make_net, **data}
    further = run_blocks([going_on.replace("60", "8")], known)[0]["further"]
    assert further.summary.parameters_before == grown.summary.parameters_after
    assert "validation score" in said
    assert "seed=mlp_small (" in said
    assert "on the validation data" in said
    assert (tmp_path / "growth.svg").read_text(encoding="utf-8").startswith("<svg")


def test_deepening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *run, in_lightning, in_trainer = python_blocks(HOW_TO / "deepen.md")
    # `make test-integrations` trains with both callbacks.
    for part in (in_lightning, in_trainer):
        compile(part, "deepen.md", "exec")

    def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_gpt(8)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    known = {"model": make_gpt(8), "make_model": make_model, "example": tokens(0)[:, :-1]}
    names, said = run_blocks(run, {**known, "batches": [tokens(step) for step in range(10)]})
    assert said.splitlines()[:2] == [
        "Deepen: 10 of 10 optimizer steps",
        "  blocks: 8 of 8 blocks awake (2 at first, 4 from step 2, 8 from step 4)",
    ]
    assert said.splitlines()[3] == "{'blocks': 8}"
    assert names["depth"].awake == {"blocks": 2}
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint.pt",
        "runs",
        "two-blocks.pt",
    }
    awake = [record.depth.awake["blocks"] for record in names["grown"].history]
    assert awake == [2, 4, 8, 8, 8]
    assert [record.depth.awake["blocks"] for record in names["deeper"].history] == awake
    assert "Deepened(GPT: validation score" in said


def test_adapting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Classifier()

    model, (batch,) = make_model(), taken_for_granted()["train"]
    known = {"model": model, "make_model": make_model, "batches": [batch] * 20}
    names, said = run_blocks(python_blocks(HOW_TO / "adapt-a-finished-model.md")[:3], known)
    assert "parameters in adapters" in said.splitlines()[-1]
    assert list(model.state_dict()) == list(make_model().state_dict())
    with_peft = python_blocks(HOW_TO / "adapt-a-finished-model.md")[3]
    # Attention of torch cannot be saved for PEFT, so the page's last lines have another model.
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    batches = [(torch.randn(8, 4), batch[1])] * 4
    own = {"model": plain, "adapters": esper.Adapt(plain, 60), "batches": batches}
    run_blocks([with_peft], {**names, **own})
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.fixture
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_wrapping_and_baking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    statistics, in_lightning, in_trainer, several, out = python_blocks(HOW_TO / "other-loops.md")
    # With `...` in them; whole they are in examples/, which `make test-integrations` runs.
    for part in (in_lightning, in_trainer):
        compile(part, "other-loops.md", "exec")

    def evaluate(model: nn.Module) -> tuple[Tensor, None]:
        return torch.ones(3), None

    known = {**taken_for_granted(), "evaluate": evaluate}
    names = run_blocks([several, statistics, out], known)[0]
    assert len(names["gardener"].history) == 1
    assert type(names["plain"]) is Classifier
    assert (tmp_path / "plain.pt").is_file()


@pytest.mark.slow
def test_training_sharing_and_judging_a_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(HOW_TO / "train-a-controller.md")
    shorter = [
        re.sub(r"rounds=50", "rounds=2", block).replace('"digits"', '"smoke"').replace("=20", "=2")
        for block in blocks
    ]
    names, said = run_blocks(shorter, taken_for_granted())
    assert names["trained"].policy == tmp_path / "runs/tamiyo/checkpoints/best"
    assert (tmp_path / "my-tamiyo").is_dir()
    assert said


@pytest.mark.integrations
def test_environments_are_made() -> None:
    names = run_blocks(python_blocks(HOW_TO / "environments.md"))[0]
    assert names["env"].action_space == names["envs"].single_action_space
