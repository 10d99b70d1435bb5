"""Copies of blocks (`kin`) in populations: the same in every strategy, and as plain PyTorch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.kin import KIN
from esper.kasmina.blueprints.registry import BLUEPRINTS
from esper.kasmina.engine import RowWeights, write_moments
from esper.kasmina.hosts import (
    HOSTS,
    BuiltInSeed,
    GrownConfig,
    ResnetConfig,
    TcnConfig,
    TransformerHost,
    VitConfig,
    build_host,
    register_host,
)
from esper.kasmina.training import build_optimizer
from esper.lab.population.engine import Strategy
from esper.lab.population.population import Population
from esper.lab.proof.play import grown_seeds
from esper.lab.tasks.task import Task
from esper.leyline.actions import LifecycleOp, decode_actions
from esper.leyline.config import Config, option
from esper.leyline.controller import ControllerContext
from esper.leyline.errors import EsperWarning
from esper.leyline.slots import BUILTIN_BLUEPRINTS, Topology
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.registry import Choice, pack_choices
from esper.tamiyo.controllers.schedule import ScheduleController, parse_schedule
from tests.lab.population.tiny_tasks import (
    TinyImages,
    TinyText,
    advance,
    assert_close,
    assert_rows_agree,
    do,
    germinate,
    make_population,
    populations,
    row_tree,
)
from tests.plots import same

pytestmark = pytest.mark.usefixtures("kept_processes")

KIN_ID = BLUEPRINTS.get(KIN).id
WAIT: Choice = {"op": LifecycleOp.WAIT}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagesConfig(Config):
    """What the host of stages is made of."""

    num_classes: int = option(3, "Number of classes.")
    shifts: bool = option(False, "Whether blocks are given a second argument.")


class ResidualStep(nn.Module):
    """Adds a convolution to the image; may be given something to add as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        out: Tensor = x + self.conv(torch.relu(self.norm(x)))
        return out if shift is None else out + shift


class Stages(nn.Module):
    """A residual CNN of two stages: one of a single block, one of two, each with a slot."""

    config_class: ClassVar[type[Config]] = StagesConfig
    topology: ClassVar[Topology] = "cnn"

    def __init__(self, config: StagesConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.early = ResidualStep()
        self.late = nn.Sequential(ResidualStep(), ResidualStep())
        self.head = nn.Linear(4, config.num_classes)
        self.slot_paths = {"r0c0": "early", "r0c1": "late"}
        self.shifts = config.shifts

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.early(x, x.mean((2, 3), keepdim=True)) if self.shifts else self.early(x)
        out: Tensor = self.head(self.late(F.avg_pool2d(x, 2)).mean((2, 3)))
        return out


@pytest.fixture(autouse=True)
def stages_host() -> Iterator[None]:
    register_host("stages")(Stages)
    yield
    HOSTS.unregister("stages")


ADAMW = {"optimizer": "adamw", "learning_rate": 0.003, "weight_decay": 0.05}
OWN_RATES = {"schedule": "cosine", "seed_rate": "own", "seed_warmup": 2, "seed_factor": 0.5}


def text(**settings: Any) -> Task:
    return TinyText(TinyText.defaults.replace(**settings))


def images(shifts: bool = False, **settings: Any) -> Task:
    host = {"host": "stages", "host_options": StagesConfig(shifts=shifts)}
    return TinyImages(TinyImages.defaults.replace(**{**host, **settings}))


def prune(slot: int = 0, speed: int = 0) -> Choice:
    return {"op": LifecycleOp.PRUNE, "slot": slot, "alpha_speed": speed, "alpha_curve": 0}


def retarget(slot: int = 0, target: int = 0, speed: int = 0, style: int = 0) -> Choice:
    heads = {"alpha_target": target, "alpha_speed": speed, "alpha_curve": 0, "style": style}
    return {"op": LifecycleOp.SET_ALPHA_TARGET, "slot": slot, **heads}


# For each of four rows: copies at once and again, of one slot and of both; kept; blended out at
# once, by a ramp, through a gate; beside another seed; and a row that never grows any.
LIFE: list[list[Choice]] = [
    [germinate("kin"), germinate("kin", 1), germinate("kin"), WAIT],
    [germinate("kin"), advance(1), germinate("kin"), germinate("norm", 0)],
    [germinate("kin"), germinate("kin", 1), retarget(0, 1, 1), advance()],
    [germinate("kin", 1), advance(1), WAIT, WAIT],
    [prune(0), {"op": LifecycleOp.FOSSILIZE, "slot": 1}, WAIT, advance()],
    [WAIT, germinate("kin", 0), retarget(0, 2, 0, 3), WAIT],
    [WAIT, germinate("kin", 0), prune(0, 1), WAIT],
    [advance(1), prune(0), WAIT, WAIT],
    [germinate("kin"), WAIT, WAIT, WAIT],
]

RESNET = ResnetConfig(channels=(4, 4), in_channels=1, num_classes=3)
VIT = VitConfig(dim=8, layers=2, segments=2, image_size=6, patch=2, in_channels=1, num_classes=3)
TCN = TcnConfig(vocab=7, dim=8, layers=2, segments=2)

TASKS = {
    "text": lambda: text(**ADAMW, **OWN_RATES),
    "images": images,
    "resnet": lambda: images(host="resnet", host_options=RESNET),
    "vit": lambda: images(host="vit", host_options=VIT, **ADAMW),
    "tcn": lambda: text(host="tcn", host_options=TCN, **ADAMW),
    "text with a budget": lambda: text(learning_rate=0.02, budget="4x"),
    "images with a budget": lambda: images(**ADAMW, budget="12x"),
}


@pytest.mark.parametrize(
    ("strategy", "task"),
    # Processes run the plain strategy: one task is enough.
    [*(("stacked", task) for task in TASKS), ("workers", "text with a budget")],
)
def test_every_strategy_gives_the_trajectory_of_rows_one_after_another(
    strategy: Strategy, task: str
) -> None:
    plain = make_population([TASKS[task]()], 4, precision="float64", copies=True)
    other = make_population([TASKS[task]()], 4, strategy, precision="float64", copies=True)
    with populations(plain, other):
        plain.reset()
        other.reset()
        seen = set()
        for choices in LIFE:
            here, there = do(plain, *choices), do(other, *choices)
            assert bool(here.last_success.all()), (choices, here.last_success)
            for name in ("stage", "copies", "flops", "seed_params", "seed_flops", "compute_spent"):
                assert torch.equal(getattr(here, name), getattr(there, name)), name
            assert torch.equal(plain.masks().blueprint_by_slot, other.masks().blueprint_by_slot)
            assert_close(here.val_loss, there.val_loss, 2e-7, "val_loss")
            assert_rows_agree(plain, other, 1e-9)
            seen.update(here.copies.flatten().tolist())
        assert seen == {0, 1, 3, 7}
        assert plain.signals().stage[1, 1] == SeedStage.FOSSILIZED
        if strategy == "stacked":
            assert all(group.engine.is_stacked for group in other.groups)
            assert_close(plain.test_scores(), other.test_scores(), 1e-9, "scores")


def test_rows_that_grow_none_are_the_same_to_the_bit() -> None:
    life = [[germinate("mlp"), germinate("norm", 1)], [advance(), advance(1)], [], [advance()]]
    for strategy in ("sequential", "stacked"):
        without = make_population([text()], 3, strategy)
        able = make_population([text()], 3, strategy, copies=True)
        with populations(without, able):
            assert without.known_blueprints() == BUILTIN_BLUEPRINTS
            assert able.known_blueprints() == (*BUILTIN_BLUEPRINTS, KIN)
            for population in (without, able):
                population.reset()
                for choices in life:
                    do(population, *choices)
            assert not bool(without.signals().copies.any())
            for row in range(3):
                assert same(row_tree(without, row), row_tree(able, row))


# -- copying, against PyTorch ----------------------------------------------------------------------


def blocks_of(weights: RowWeights, copies: int) -> list[dict[str, Tensor]]:
    """Parameters of the last layer of a text host and of its copies, in their order."""
    own = {k[9:]: v for k, v in weights.host.items() if k.startswith("layers.1.")}
    seeds = weights.seeds[1]
    if copies == 1:
        return [own, {k[5:]: v for k, v in seeds.items()}]
    return [own, *({k[7:]: v for k, v in seeds.items() if k[5] == str(n)} for n in range(copies))]


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
@pytest.mark.parametrize("training", [{}, ADAMW], ids=["sgd", "adamw"])
def test_copies_have_weights_and_moments_of_their_sources_to_the_bit(
    strategy: Strategy, training: dict[str, Any]
) -> None:
    with populations(make_population([text(**training)], 2, strategy, copies=True)) as (one,):
        one.reset()
        (group,) = one.groups
        for copies in (1, 3, 7):
            before = group.engine.read(0)
            choices = pack_choices([germinate("kin", 1), WAIT], one.masks())
            assert bool(group.act(decode_actions(choices)).took_effect[0])
            after = group.engine.read(0)
            held = blocks_of(before, (copies - 1) // 2) if copies > 1 else None
            now = blocks_of(after, copies)
            awake = held or now[:1]
            for number, values in enumerate(now):
                assert same(values, awake[number % len(awake)]), (copies, number)
            moments = after.seed_moments[1]
            for part in ("momentum", "squares", "steps"):
                mine = getattr(moments, part)
                theirs = getattr(after.host_moments, part)
                prefix = "seed." if copies == 1 else f"seed.{(copies - 1) // 2}."
                for name in theirs:
                    if name.startswith("layers.1."):
                        assert same(mine[prefix + name[9:]], theirs[name]), (copies, part, name)
            group.live()


def test_the_next_epoch_is_that_of_plain_pytorch() -> None:
    """After 1, 2 and 3 germinations: blocks copied by hand, one epoch, no clipping; to the bit."""
    task = text(**ADAMW, max_grad_norm=0.0)
    with populations(make_population([task], 1, copies=True)) as (one,):
        one.reset()
        (group,) = one.groups
        condition = group.conditions[0]
        for copies in (1, 3, 7):
            choices = pack_choices([germinate("kin", 1)], one.masks())
            assert bool(group.act(decode_actions(choices)).took_effect[0])
            start = group.engine.read(0)
            plain: Any = TransformerHost(
                task.config.host_options.replace(layers=2 + copies, segments=1)
            )
            plain.load_state_dict(start.host, strict=False)
            named = dict(plain.named_parameters())
            renamed = {k: f"layers.2.{k[5:]}" for k in start.seeds[1]}
            if copies > 1:
                renamed = {k: f"layers.{2 + int(k[5])}.{k[7:]}" for k in start.seeds[1]}
            optimizer = build_optimizer(task.config, plain.parameters())
            with torch.no_grad():
                for old, new in renamed.items():
                    named[new].copy_(start.seeds[1][old])
            moments = start.host_moments
            own = start.seed_moments[1]
            for part in ("momentum", "squares", "steps"):
                getattr(moments, part).update(
                    {renamed[k]: v for k, v in getattr(own, part).items()}
                )
            write_moments(optimizer, named, moments)
            epoch = int(group.tracker.epoch[0]) + 1
            usual, size = condition.data.samples_per_step, task.config.batch_size
            order = condition.data.order_from(group.keys[0], (epoch - 1) * usual, usual)
            for part in order.split(size):
                x, y = condition.data.batch("train", part, None)
                optimizer.zero_grad()
                task.objective(plain(x), y)[0].mean().backward()
                optimizer.step()
            group.live()
            end = group.engine.read(0)
            for name, value in end.host.items():
                assert torch.equal(value, named[name]), (copies, name)
            for old, new in renamed.items():
                assert torch.equal(end.seeds[1][old], named[new]), (copies, old)


# -- snapshots and forks ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sequential", "stacked"])
def test_snapshots_and_forks_go_on_as_the_rows_do(strategy: Strategy) -> None:
    task = text(**ADAMW)
    one = make_population([task], 4, strategy, precision="float64", copies=True)
    other = make_population([task], 4, strategy, precision="float64", copies=True)
    with populations(one, other):
        one.reset()
        for choices in LIFE[:4]:
            do(one, *choices)
        saved = one.snapshot()
        fork = one.fork([0, 1])
        with populations(fork):
            other.reset()
            other.restore(saved)
            for choices in LIFE[4:]:
                do(one, *choices)
                do(other, *choices)
                do(fork, *choices[:2])
            for row in range(4):
                assert same(row_tree(one, row), row_tree(other, row))
            assert_rows_agree(one, fork, 1e-12, {0: 0, 1: 1})
        plain = make_population([task], 4, precision="float64", copies=True)
        with populations(plain):
            plain.restore(saved)
            for choices in LIFE[4:]:
                do(plain, *choices)
            assert_rows_agree(plain, one, 1e-9)


def test_a_rollback_goes_back_to_the_block_and_keeps_copies_that_are_kept() -> None:
    for strategy in ("sequential", "stacked"):
        with populations(make_population([text()], 2, strategy, copies=True)) as (one,):
            one.reset()
            do(one, germinate("kin"), germinate("kin"))
            do(one, germinate("kin"), germinate("kin"))
            do(one, advance(), WAIT)
            fossil = {"op": LifecycleOp.FOSSILIZE, "slot": 0}
            assert bool(do(one, fossil, WAIT).last_success.all())
            (group,) = one.groups
            for row in range(2):
                weights = group.engine.read(row)
                name = next(iter(weights.host))
                weights.host[name].fill_(torch.nan)
                group.engine.write(row, weights, group.state.select([row]))
            signals = do(one)
            assert bool(signals.rolled_back.all())
            assert signals.copies.tolist() == [[3, 0], [0, 0]]
            assert bool(torch.isfinite(signals.val_loss).all())
            assert bool(torch.isfinite(do(one).val_loss).all())


# -- masks, limits and what cannot be stacked ------------------------------------------------------


def test_masks_and_limits_know_what_a_doubling_costs() -> None:
    size = sum(p.numel() for p in Stages(StagesConfig()).late.parameters())
    host = images().host_parameters
    with populations(make_population([images()], 1, copies=True)) as (free,):
        free.reset()
        gate = int(free.groups[0].table.costs.seeds.gate_params[0, 1])
    # Room for three copies of the stage, and a gate.
    limit = (host + 3 * size + gate + 0.5) / host
    with populations(make_population([images(param_limit=limit)], 1, copies=True)) as (one,):
        one.reset()
        assert bool(one.masks().blueprint_by_slot[0, 1, KIN_ID])
        for copies in (1, 3):
            signals = do(one, germinate("kin", 1))
            assert bool(signals.last_success[0])
            assert signals.params.tolist() == [host + copies * size]
            masks = one.masks()
            assert masks.blueprint_by_slot[0, 1].nonzero().flatten().tolist() == (
                [KIN_ID] if copies == 1 else []
            )
        assert not bool(do(one, germinate("kin", 1)).last_success[0])


def test_a_budget_pays_for_copies_or_masks_them() -> None:
    with populations(make_population([text(budget="1.5x")], 1, copies=True)) as (one,):
        one.reset()
        assert bool(do(one, germinate("kin")).last_success[0])
        while bool(one.masks().blueprint_by_slot[0, 0, KIN_ID]):
            before = one.signals()
            after = do(one, germinate("kin"))
            assert bool(after.last_success[0])
            spent = after.compute_spent - before.compute_spent
            assert spent >= 3 * after.flops * text().config.batch_size
        assert 0 < int(one.signals().copies[0, 0]) < 7
        assert not bool(do(one, germinate("kin")).last_success[0])


def test_blocks_with_further_arguments_run_one_after_another_and_say_so() -> None:
    task = images(shifts=True)
    with populations(make_population([task], 2, "stacked")) as (stacked,):
        stacked.reset()
        assert stacked.groups[0].engine.is_stacked
    with populations(make_population([task], 2, "stacked", copies=True)) as (one,):
        with pytest.warns(EsperWarning, match=r"blueprint 'kin': 'early' is given several argum"):
            one.reset()
        assert not one.groups[0].engine.is_stacked
        assert bool(do(one, germinate("kin"), germinate("kin", 1)).last_success.all())


def test_hosts_without_a_residual_path_do_not_offer_it() -> None:
    with populations(make_population([TinyImages], 2, "stacked", copies=True)) as (one,):
        one.reset()
        assert not bool(one.masks().blueprint_by_slot[..., KIN_ID].any())
        assert not bool(do(one, germinate("kin")).last_success[0])


# -- controllers -----------------------------------------------------------------------------------


def context(population: Population) -> ControllerContext:
    return ControllerContext(
        slot_names=("r0c0", "r0c1"), blueprint_names=population.known_blueprints(), seed=5
    )


def play(population: Population, controller: Any, epochs: int) -> list[list[list[int]]]:
    """Return how many copies every row has in every slot, by epoch."""
    signals = population.reset()
    controller.reset(population.rows, "cpu")
    seen = []
    for _ in range(epochs):
        signals = population.step(controller.act(signals, population.masks()))
        seen.append(signals.copies.tolist())
    return seen


def test_a_schedule_doubles_and_keeps() -> None:
    entries = [
        {"epoch": epoch, "op": op, "slot": 1, "blueprint": "kin"}
        for epoch, op in ((1, "germinate"), (3, "germinate"), (5, "grow"), (9, "grow"))
    ]
    with populations(make_population([text()], 2, "stacked", copies=True)) as (one,):
        controller = ScheduleController([parse_schedule(entries, context(one))], context(one))
        seen = play(one, controller, 10)
        assert [rows[0][1] for rows in seen[:6]] == [1, 1, 3, 3, 7, 7]
        assert one.signals().stage[:, 1].tolist() == [SeedStage.FOSSILIZED] * 2


def test_written_rules_may_choose_it() -> None:
    rules = "heuristic:rotation=[kin],min_epoch=1,plateau_epochs=0"
    quick = {"tracker": {"stable_epochs": 0}}
    for name in (rules, "periodic:every=1"):
        one = make_population([text()], 4, "stacked", copies=True)
        one.config = one.config.from_mapping({**one.config.to_mapping(), **quick})
        with populations(one), warnings.catch_warnings():
            warnings.simplefilter("error")
            seen = torch.tensor(play(one, make_controller(name, context(one)), 12))
            assert bool(seen.any()), name


def test_a_random_controller_draws_it_where_copies_can_be_doubled() -> None:
    with populations(make_population([text()], 48, copies=True)) as (one,):
        one.reset()
        signals = do(one, *[germinate("kin", row % 2) for row in range(48)])
        controller = make_controller("random", context(one))
        controller.reset(48, "cpu")
        actions = controller.act(signals, one.masks())
        doubles = actions["op"] == LifecycleOp.GERMINATE
        doubles &= signals.copies.gather(1, actions["slot"][:, None])[:, 0] > 0
        assert bool(doubles.any())
        assert bool((actions["blueprint"][doubles] == KIN_ID).all())
        signals = one.step(actions)
        assert (signals.copies.amax(1) == 3).tolist() == doubles.tolist()


def test_what_has_grown_is_built_in_from_the_start_with_weights_of_its_own() -> None:
    task = text()
    with populations(make_population([task], 2, "stacked", copies=True)) as (one,):
        one.reset()
        do(one, germinate("kin"), germinate("kin", 1))
        signals = do(one, germinate("kin"), germinate("norm"))
        names = tuple(task.slot_paths)
        for row, copies in enumerate((3, 1)):
            seeds = grown_seeds(signals, row, names, one.known_blueprints())
            built_in = tuple(map(BuiltInSeed.from_mapping, seeds))
            # The other seed of the second row is not blended in yet.
            assert [seed.copies for seed in built_in] == [copies]
            config = GrownConfig(
                host="transformer", host_options=task.config.host_options, seeds=built_in
            )
            host = build_host("grown_sequence", config)
            sizes = signals.slot_params[row][signals.alpha[row] > 0].sum()
            expected = int(signals.host_params[row] + sizes)
            assert sum(p.numel() for p in host.parameters()) == expected
        layers = [host.get_submodule("host.layers.1"), *host.get_submodule("host.layers.1").seed]
        weights = [layers[0].module.mlp[0].weight, *(layer.mlp[0].weight for layer in layers[1:])]
        assert not torch.equal(*weights)
        host(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
        assert all(weight.grad is not None for weight in weights)
