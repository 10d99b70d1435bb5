"""`esper clone`: trains a policy to imitate the best schedules of a search, by DAgger.

A search finds a schedule for every *train* member. The policy learns to carry them out from its
observations alone, so that on a new member it does what was best on similar ones. In the first
round the schedules act. In every later round the policy acts in more of the rows, while
`ScheduleTeacher` labels each state with the action of the schedule. The policy learns from all
rounds so far, and so also learns what to do after its own mistakes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.lab.proof.arm import ScheduleArm
from esper.lab.proof.plans import PlainSchedule
from esper.lab.proof.play import (
    Cell,
    PlayConfig,
    Player,
    Progress,
    Show,
    Stage,
    parse_schedules,
)
from esper.lab.tasks.family import MemberChoice
from esper.lab.tasks.member import AnyMember
from esper.leyline.actions import HEAD_NAMES, LifecycleOp, TensorRecord, causal_table
from esper.leyline.config import Config, option
from esper.leyline.errors import UsageError
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.stages import LIVE_STAGES, MODULE_STAGES
from esper.simic.training.episodes import live_episodes
from esper.simic.training.row_source import draw_uniforms
from esper.tamiyo.controllers.policy_file import CHECKPOINT_POLICY, Policy, new_policy, save_policy
from esper.tamiyo.controllers.registry import (
    WAIT,
    Choice,
    RowView,
    advance_seeds,
    pack_choices,
    read_rows,
)
from esper.tamiyo.controllers.schedule import Entry, Schedule, carry_out
from esper.tamiyo.networks.config import PolicyConfig
from esper.tamiyo.networks.decision import OP
from esper.utils.files import atomic_write_text
from esper.utils.manifest import MANIFEST_FILE
from esper.utils.randomness import generator
from esper.utils.storage import load_tree, save_tree

# ---- The action of a schedule in any state, also in states that it did not reach itself


class ScheduleTeacher:
    """Returns the next action of every row's schedule.

    Args:
        schedules: one for every row, with `grow` entries and doublings by `kin`, as a search
            writes them.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        """Keep the schedules; the teacher has no other state."""
        known = (LifecycleOp.GERMINATE,)
        assert all(entry.op in known for schedule in schedules for entry in schedule)
        self._schedules = tuple(schedules)

    def advise(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the schedule's action in each row."""
        rows = read_rows(signals, masks)
        return pack_choices(list(map(advise_row, rows, self._schedules)), masks)


def advise_row(row: RowView, schedule: Schedule) -> Choice:
    """Return the schedule's action in one row."""
    planned: dict[int, list[Entry]] = {}
    for entry in schedule:
        for slot in entry.slots_of(sum(row.enabled)):
            planned.setdefault(slot, []).append(entry)
    live = [slot for slot, stage in enumerate(row.stage) if stage in LIVE_STAGES]
    wanted = [s for s in live if s in planned and row.blueprint[s] in planned[s][0].blueprints]
    prune = LifecycleOp.PRUNE
    wishes = advance_seeds(row, [slot for slot in wanted if planned[slot][0].is_tended])
    wishes += [
        {"op": int(prune), "slot": slot}
        for slot in live
        if slot not in wanted and row.legal[prune][slot]
    ]
    for slot, entries in planned.items():
        done = _times_grown(row, slot)
        next_one = entries[done] if done < len(entries) else None
        if next_one is None or not row.legal[next_one.op][slot]:
            continue
        if row.epoch >= next_one.first_epoch(row.horizon):
            choice = carry_out(next_one, slot, row)
            wishes += [] if choice is None else [choice]
    # An op whose gate has just failed comes last, so that other seeds need not wait for it.
    failed = None if row.last_success else row.last_op
    return min(wishes, key=lambda wish: wish["op"] == failed, default=WAIT)


def _times_grown(row: RowView, slot: int) -> int:
    """Return how many entries of a slot are done: its doublings, or 1 for another seed."""
    if row.stage[slot] not in MODULE_STAGES:
        return 0
    return (row.copies[slot] + 1).bit_length() - 1 if row.copies[slot] else 1


CLONE_SEEDS = 1 << 34
"""First seed of clones' episodes; searches, training and evaluations use smaller ones."""

SUMMARY_FILE = "clone.json"
_STATE, _KIND, _VERSION = "state", "clone", 1
_NEVER = -1e9
"""Logit of illegal choices: finite, so that a head without any legal choice has a gradient of 0."""
_HELD_OUT = 8
"""One row in 8 is held out for validation."""


MINIBATCH = 64  # Episodes of one step.
MAX_GRAD_NORM = 1.0  # Norm to which gradients are clipped.


@dataclass(frozen=True, kw_only=True)
class CloneConfig(Config):
    """Which schedules are cloned, on which members, and how."""

    plans: str = option("", "File with a schedule for every member: lessons.json of a search.")
    rounds: int = option(
        5, "Rounds of episodes; schedules act in half as many each time.", minimum=1
    )
    episodes: int = option(
        256, "Episodes of a round: of as many members, or several of each.", minimum=1
    )
    passes: int = option(30, "Passes over all episodes so far after every round.", minimum=1)
    learning_rate: float = option(1e-3, "Step size of Adam, which falls to 0 in a round.", above=0)
    smoothing: float = option(
        0.0,
        "Share of what is wanted that is spread evenly over all that is legal: a policy that is "
        "not certain can be trained on by PPO.",
        minimum=0,
        maximum=0.5,
    )
    seed: int = option(0, "Seed of weights, draws and orders.", minimum=0)
    opening: int = option(0, "Clones learn from no claim members: always 0.", minimum=0, maximum=0)
    members: MemberChoice = option(MemberChoice(split="train"), "What is learned on.")
    policy: PolicyConfig = option(
        PolicyConfig(lstm_hidden_dim=128, layout="travelling"), "The network."
    )
    play: PlayConfig = option(PlayConfig, "How networks are grown.")

    def __post_init__(self) -> None:
        """Refuse members that a claim or a choice is made by."""
        super().__post_init__()
        if self.members.split != "train":
            raise UsageError("a clone learns on train members alone; leave --split out")


@dataclass(frozen=True, slots=True)
class Lessons(TensorRecord):
    """Episodes labelled with the schedules' actions; tensors [N, T, ...] on the CPU."""

    states: Tensor
    """float32 [N, T, D], raw observations."""
    blueprints: Tensor
    """int64 [N, T, S]."""
    actions: Tensor
    """int64 [N, T, 8], the schedule's action."""
    masks: Tensor
    """bool [N, T, 8, K], legal choices."""
    counts: Tensor
    """bool [N, T], the episode was running and more than one op was legal."""

    @classmethod
    def join(cls, parts: Sequence[Lessons]) -> Lessons:
        """Return all episodes; shorter ones are padded with steps that do not count."""
        steps = max(part.counts.shape[1] for part in parts)

        def padded(tensor: Tensor) -> Tensor:
            missing = steps - tensor.shape[1]
            last = tensor[:, -1:].expand(-1, missing, *tensor.shape[2:])
            if tensor.dtype == torch.bool and tensor.dim() == 2:
                last = torch.zeros_like(last)
            return torch.cat([tensor, last], 1)

        return cls(*(torch.cat([padded(getattr(p, f.name)) for p in parts]) for f in fields(cls)))


def find_taught(
    members: Sequence[AnyMember], plans: Mapping[str, PlainSchedule]
) -> list[AnyMember]:
    """Return the members that have a schedule."""
    taught = [member for member in members if member.label in plans]
    if not taught:
        raise UsageError("no member has a schedule; run `esper search` on these members first")
    return taught


class _Dagger:
    """Acts in the rows of one round and collects its lessons.

    Args:
        policy: acts in the rows that are not taught.
        teacher: acts in the others, and labels every state.
        taught: bool [R], rows in which the teacher acts.
        keys: keys of the policy's draws.
    """

    def __init__(
        self, policy: Policy, teacher: ScheduleTeacher, taught: Tensor, keys: tuple[int, ...]
    ) -> None:
        self._policy, self._teacher, self._taught, self._keys = policy, teacher, taught, keys
        self._kept: dict[str, list[Tensor]] = {field.name: [] for field in fields(Lessons)}

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start an episode in every row."""
        self._hidden = self._policy.network.initial_hidden(rows)
        self._active = torch.ones(rows, dtype=torch.bool, device=device)

    @torch.no_grad()
    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the teacher's action in taught rows and the policy's in the others."""
        policy, kept, rows = self._policy, self._kept, signals.rows
        network, table, device = policy.network, policy.network.table, masks.op.device
        is_over = signals.rolled_back | (signals.epoch >= signals.max_epochs)
        self._active &= ~is_over.to(device)
        wanted = self._teacher.advise(signals, masks)
        raw, blueprints = policy.layout.observe(signals, device)
        uniforms = draw_uniforms(rows, *self._keys, len(kept["states"]), "clone", device=device)
        own = network.get_action(
            policy.normalizer.normalize(raw),
            masks,
            blueprints,
            self._hidden,
            explore=False,
            uniforms=uniforms,
        )
        self._hidden = own.hidden
        chosen = table.rows_of(wanted["op"], wanted["slot"])
        step = {
            "states": raw,
            "blueprints": blueprints,
            "actions": torch.stack([wanted[head] for head in HEAD_NAMES], -1),
            "masks": table.select(table.row_masks(masks, (rows,)), chosen),
            "counts": self._active & (masks.op.sum(1) > 1),
        }
        for name, tensor in step.items():
            kept[name].append(tensor.cpu())
        return {head: torch.where(self._taught, wanted[head], own[head]) for head in HEAD_NAMES}

    def lessons(self) -> Lessons:
        """Return the episodes."""
        return Lessons(**{name: torch.stack(steps, 1) for name, steps in self._kept.items()})


class Cloner:
    """A clone in its folder.

    Args:
        config: settings of the clone.
        members: members to learn on; those without a schedule are left out.
        plans: schedules by member.
        folder: where the clone is saved, and continued from.
        player: grows the networks.
        show: called with the progress.
        is_stopped: called after every epoch and every pass; True stops the clone.
    """

    def __init__(
        self,
        config: CloneConfig,
        members: Sequence[AnyMember],
        plans: Mapping[str, PlainSchedule],
        folder: Path,
        player: Player,
        show: Show = lambda progress: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Find the members, and load what is in the folder."""
        self.config, self.folder, self._player = config, folder, player
        self._plans = plans
        self._show, self._is_stopped = show, is_stopped
        self._started = time.monotonic()
        self.members = find_taught(members, plans)
        self._lessons: list[Lessons] = []
        self._policy: Policy | None = None
        self.history: list[dict[str, float | None]] = []
        """Figures of every round; a round that was played but not learned from has no loss yet."""
        if (folder / _STATE / MANIFEST_FILE).exists():
            self._load()

    def run(self) -> bool:
        """Play and learn round after round; return False if stopped."""
        try:
            for number in range(self.config.rounds):
                if number == len(self.history) and not self._play(number):
                    return False
                if "loss" not in self.history[number] and not self._learn(number):
                    return False
        finally:
            self._player.close()
        return True

    def summary(self) -> dict[str, Any]:
        """Return the members, the figures of every round, and the folder of the policy."""
        return {
            "members": [member.label for member in self.members],
            "rounds": self.history,
            "policy": str(self.folder / CHECKPOINT_POLICY),
        }

    # -------------------------------------------------------------------------------------- playing

    def _play(self, number: int) -> bool:
        """Play the episodes of a round; return False if stopped."""
        stage = self._player.prepare(self._cells(number))
        population = stage.population
        policy = self._policy_for(stage).to(population.device)
        cells, context = [cell for cell, _ in stage.cells], stage.context(self.config.seed)
        teacher = ScheduleTeacher(parse_schedules(cells, context))
        taught = self._taught_rows(number, population.rows)
        keys = (self.config.seed, number)
        actor = _Dagger(policy, teacher, taught.to(population.device), keys)
        for epoch, moment in enumerate(live_episodes(population, actor, stage.seeds)):
            if moment.actions is None:
                steps = int((moment.signals.max_epochs - moment.signals.epoch).max())
                continue
            self._tell(number, epoch / steps / 2, f"epoch {epoch}")
            if self._is_stopped():
                return False
        self._lessons.append(actor.lessons())
        scores = moment.signals.val_score.cpu().double()
        outcome: dict[str, float | None] = {"teacher_share": _teacher_share(number)}
        for name, which in (("teacher_score", taught), ("clone_score", ~taught)):
            outcome[name] = float(scores[which].mean()) if bool(which.any()) else None
        self.history.append(outcome)
        self._save()
        return True

    def _cells(self, number: int) -> list[Cell]:
        """Return the episodes of a round, dealt out among the members in a random order."""
        stream = generator(self.config.seed, number, "clone members")
        order = torch.randperm(len(self.members), generator=stream).tolist()
        share, more = divmod(self.config.episodes, len(self.members))
        counts = {member: share + (rank < more) for rank, member in enumerate(order)}
        first = CLONE_SEEDS + (number << 20)
        arm = ScheduleArm("teacher", lambda member: self._plans[member.label])
        return [
            Cell("clone", arm, member, tuple(range(first, first + counts[place])))
            for place, member in enumerate(self.members)
            if counts[place]
        ]

    def _taught_rows(self, number: int, rows: int) -> Tensor:
        """Return bool [R], the rows in which the schedule acts."""
        stream = generator(self.config.seed, number, "taught rows")
        return torch.rand(rows, generator=stream) < _teacher_share(number)

    def _policy_for(self, stage: Stage) -> Policy:
        if self._policy is None:
            names, kinds = stage.population.known_blueprints(), stage.population.known_kinds()
            self._policy = new_policy(
                self.config.policy.fitted(stage.population.num_slots, len(names)),
                blueprint_names=names,
                blueprint_kinds=kinds,
                seed=self.config.seed,
            )
        return self._policy

    # ------------------------------------------------------------------------------------- learning

    def _learn(self, number: int) -> bool:
        """Learn from all rounds so far; return False if stopped."""
        assert self._policy is not None, "episodes come first"
        policy, config = self._policy, self.config
        device = policy.network.floors.device
        newest = self._lessons[-1]
        policy.normalizer.update(newest.states[newest.counts].to(device))
        lessons = Lessons.join(self._lessons)
        everyone = torch.arange(len(lessons.counts))
        apart = everyone % _HELD_OUT == _HELD_OUT - 1
        learned, held_out = everyone[~apart], everyone[apart]
        parameters = [each for each in policy.network.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=config.learning_rate)
        count = math.ceil(len(learned) / MINIBATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.passes * count)
        order = generator(config.seed, number, "clone order")
        for turn in range(config.passes):
            for part in learned[torch.randperm(len(learned), generator=order)].chunk(count):
                loss, _ = _imitate(policy, lessons.select(part).to(device), config.smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                schedule.step()
                lost = float(loss.detach())
            done = (1 + (turn + 1) / config.passes) / 2
            self._tell(number, done, f"pass {turn + 1}, loss {lost:.3f}")
            if self._is_stopped():
                return False
        result = self.history[number]
        if len(held_out):
            with torch.no_grad():
                chosen = lessons.select(held_out).to(device)
                other, agreed = _imitate(policy, chosen, config.smoothing)
            result |= {"held_out_loss": float(other), "held_out_agreement": agreed}
        result["loss"] = lost
        self._save()
        return True

    def _tell(self, number: int, share: float, text: str) -> None:
        """Show the progress: episodes are half of a round, passes the other half."""
        rounds = self.config.rounds
        line = f"round {number + 1} of {rounds}, {text}"
        spent = time.monotonic() - self._started
        self._show(Progress(number + share, float(rounds), spent, line))

    # ---------------------------------------------------------------------------------------- state

    def _save(self) -> None:
        assert self._policy is not None
        meta = {"recipe": "clone", "round": len(self.history), "rounds": self.config.rounds}
        play = self.config.play
        horizon = play.horizon or min(member.task().config.horizon for member in self.members)
        policy = replace(self._policy, limits=play.growth_limits, horizon=horizon)
        save_policy(self.folder / CHECKPOINT_POLICY, policy, meta=meta)
        tree = {
            "history": self.history,
            "lessons": [lessons.state_dict() for lessons in self._lessons],
            "network": dict(self._policy.network.state_dict()),
            "normalizer": dict(self._policy.normalizer.state_dict()),
            "slots": self._policy.network.config.num_slots,
            "blueprints": list(self._policy.blueprint_names),
            "kinds": list(self._policy.blueprint_kinds),
        }
        save_tree(self.folder / _STATE, tree, kind=_KIND, version=_VERSION)
        atomic_write_text(self.folder / SUMMARY_FILE, json.dumps(self.summary(), indent=1))

    def _load(self) -> None:
        tree, _ = load_tree(self.folder / _STATE, kind=_KIND, version=_VERSION)
        self.history = [dict(each) for each in tree["history"]]
        self._lessons = [Lessons(**each) for each in tree["lessons"]]
        self._policy = new_policy(
            self.config.policy.fitted(int(tree["slots"]), len(tree["blueprints"])),
            blueprint_names=tuple(tree["blueprints"]),
            blueprint_kinds=tuple(tree["kinds"]),
        )
        self._policy.network.load_state_dict(tree["network"])
        self._policy.normalizer.load_state_dict(tree["normalizer"])


def _teacher_share(number: int) -> float:
    """Return the share of rows in which the schedules act."""
    return float(0.5**number)


def _imitate(policy: Policy, lessons: Lessons, smoothing: float) -> tuple[Tensor, float | None]:
    """Return the mean loss of the steps that count, and the share of ops that agree.

    Agreement is over steps in which the schedule does not wait, as it does most of the time; None
    without such steps.
    """
    network = policy.network
    scores = network.score(
        policy.normalizer.normalize(lessons.states),
        lessons.blueprints,
        lessons.actions,
        lessons.masks,
        explore=False,
        with_baseline=False,
    )
    counts = lessons.counts
    op = lessons.actions[..., OP]
    legal = scores.masks
    every = scores.logits.masked_fill(~legal, _NEVER).log_softmax(-1)
    even = every.masked_fill(~legal, 0.0).sum(-1) / legal.sum(-1).clamp(min=1)
    even = even * causal_table().to(even.device)[op]
    smoothed = (1 - smoothing) * scores.log_probs + smoothing * even
    loss = -(smoothed.sum(-1) * counts).sum() / counts.sum().clamp(min=1)
    ops = scores.logits[..., OP, :].masked_fill(~lessons.masks[..., OP, :], -torch.inf)
    does = counts & (op != int(LifecycleOp.WAIT))
    return loss, float((ops.argmax(-1) == op)[does].float().mean()) if bool(does.any()) else None
