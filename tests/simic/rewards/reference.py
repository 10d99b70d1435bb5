"""Rewards of one row in plain numbers: what the vectorised terms must agree with.

Written to be read beside docs/rewards.md, one rule after the other; slow and simple.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

from esper.leyline.signals import Signals
from esper.simic.rewards.contract import Transition
from esper.simic.rewards.modes import RewardConfig

WAIT, GERMINATE, SET_ALPHA, PRUNE, FOSSILIZE, ADVANCE = range(6)
GERMINATED, TRAINING, BLENDING, HOLDING, FOSSIL = 2, 3, 4, 6, 7
LIVE = (GERMINATED, TRAINING, BLENDING, HOLDING)
MODULE = (*LIVE, FOSSIL)
BLENDED = (BLENDING, HOLDING, FOSSIL)
NOTHING = 1e-40
"""Discounts of absurd losses are 0 in float32."""


def row_of(signals: Signals, row: int) -> Any:
    """Return one row's signals as plain numbers and lists."""
    plain = {f.name: getattr(signals, f.name)[row].tolist() for f in dataclasses.fields(signals)}
    return SimpleNamespace(**plain)


class RowReference:
    """One row's reward; remembers one record per slot that holds a seed."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def reset(self, signals: Any) -> None:
        self.seeds: dict[int, Any] = {}
        for slot, stage in enumerate(signals.stage):
            if stage in MODULE:
                self.seeds[slot] = self.record(None, signals.val_score)
        self.contributing: set[int] = set()
        self.ledger: list[tuple[int, int, int, float]] = []
        self.pending = 0.0
        self.has_parted = False
        self.germinations = 0
        self.first_slot: int | None = None
        self.gain = 0.0
        self.gains = [0.0]

    @staticmethod
    def record(score_before: float | None, score_first: float) -> Any:
        return SimpleNamespace(before=score_before, first=score_first, paid=0.0, balance=0.0)

    def step(self, transition: Transition, row: int) -> dict[str, float]:
        self.before = row_of(transition.before, row)
        self.after = row_of(transition.after, row)
        self.slot = int(transition.actions["slot"][row])
        self.op = int(transition.actions["op"][row]) if self.after.last_success else WAIT
        self.is_last = bool(transition.is_last[row])
        self.active = bool(transition.active[row])
        self.rolled_back = self.active and self.after.rolled_back
        self.ended = self.active and (self.is_last or self.rolled_back)
        self.twin = float(transition.twin_after[row])
        self.live = [s for s, stage in enumerate(self.before.stage) if stage in LIVE]
        terms = getattr(self, f"mode_{self.config.mode}")()
        if not self.active:
            terms = dict.fromkeys(terms, 0.0)
        self.follow()
        return terms

    # -- modes -----------------------------------------------------------------------------------

    def mode_twin(self) -> dict[str, float]:
        config = self.config.twin
        now = self.gain_now()
        recent = [*self.gains, now][-5:]
        counted = mean(recent) if self.is_last else now
        if self.rolled_back:
            terms = {"gain": -self.gain, "rent": 0.0}
        else:
            added = (self.after.params - self.after.host_params) / self.after.host_params
            flops = (self.after.flops - self.after.host_flops) / self.after.host_flops
            points = config.rent_points * added + config.flop_rent_points * flops
            steps = self.after.max_epochs - 1
            terms = {
                "gain": self.config.gamma * counted - self.gain,
                "rent": -points / steps,
            }
        undecided = sum(stage in LIVE for stage in self.after.stage)
        settles = self.is_last and not self.rolled_back
        terms["terminal"] = -config.open_seed_cost * undecided if settles else 0.0
        terms["rollback"] = -1.0 if self.rolled_back else 0.0
        if self.config.pay_hindsight:
            terms["hindsight"] = 0.0 if self.rolled_back else self.hindsight()
        self.gain, self.gains = counted, [*self.gains, now]
        return terms

    def mode_shaped(self) -> dict[str, float]:
        parts = {slot: self.attribution_of(slot) for slot in self.live}
        terms = self.shaped_terms(mean_or_zero(list(parts.values())))
        for slot, part in parts.items():
            self.seeds[slot].paid += part / len(parts)
        return terms

    def mode_escrow(self) -> dict[str, float]:
        held = {slot: seed.balance for slot, seed in self.seeds.items()}
        paid = sum(self.move_balance(slot) for slot in list(self.seeds))
        terms = self.shaped_terms(paid)
        if self.rolled_back:
            for slot, balance in held.items():
                self.seeds[slot].balance = balance
        terms["escrow"] = 0.0
        if self.ended:
            for slot, seed in self.seeds.items():
                if self.after.stage[slot] != FOSSIL:
                    terms["escrow"] -= seed.balance
        return terms

    def mode_sparse(self) -> dict[str, float]:
        return self.with_rollback({"terminal": self.committed_terminal()})

    def mode_minimal(self) -> dict[str, float]:
        young = self.op == PRUNE and self.before.age[self.slot] < 5
        action = -0.1 if young else 0.0
        return self.with_rollback({"action": action, "terminal": self.committed_terminal()})

    def mode_basic(self) -> dict[str, float]:
        change = self.after.val_score - self.before.val_score
        used = self.effective_params()
        return self.with_rollback(
            {
                "gain": 5 * change / 100,
                "rent": -0.1 * used / self.after.budget,
            }
        )

    def mode_simplified(self) -> dict[str, float]:
        terminal = 0.0
        if self.is_last:
            terminal = 3 * self.after.val_score / 100
            terminal += 2 * self.count_contributing()
        action = -0.01 if self.op != WAIT else 0.0
        terms = self.with_rollback({"action": action, "terminal": terminal})
        terms["pbrs"] = self.pbrs(0.3, 0.3)
        return terms

    def mode_loss(self) -> dict[str, float]:
        config = self.config.loss
        fall = (self.before.val_loss - self.after.val_loss) / config.typical_change
        fall = max(-5, min(5, fall))
        if fall < 0:
            fall *= 0.5
        paying = [
            slot
            for slot, (stage, age) in enumerate(zip(self.after.stage, self.after.age, strict=True))
            if stage in MODULE and age > 3
        ]
        grown = sum(self.after.slot_params[slot] for slot in paying)
        rent = config.rent_weight * math.log1p(grown / self.after.host_params)
        terminal = 0.0
        if self.is_last:
            share = (config.baseline - self.after.val_loss) / (config.baseline - config.target)
            terminal = max(0.0, min(1.0, share))
        terms = self.with_rollback(
            {
                "gain": 5 * fall,
                "rent": -min(rent, 5),
                "terminal": terminal,
            }
        )
        terms["pbrs"] = self.pbrs(0.1, 0.0)
        return terms

    def with_rollback(self, terms: dict[str, float]) -> dict[str, float]:
        """A rollback replaces everything a step would have paid."""
        if self.rolled_back:
            terms = dict.fromkeys(terms, 0.0)
        terms["rollback"] = -10.0 if self.rolled_back else 0.0
        return terms

    def shaped_terms(self, attribution: float) -> dict[str, float]:
        terms = {
            "attribution": attribution,
            "blending": mean_or_zero([self.blending_of(slot) for slot in self.live]),
            "holding": mean_or_zero([self.holding_of(slot) for slot in self.live]),
            "synergy": mean_or_zero([self.synergy_of(slot) for slot in self.live]),
            "rent": self.rent(),
            "shock": self.shock(),
            "occupancy": self.occupancy(),
            "first_germination": self.first_germination(),
            "action": self.action(),
            "terminal": self.terminal(),
        }
        terms = self.with_rollback(terms)
        removed = [s for s in self.seeds if self.after.stage[s] not in MODULE]
        terms["auto_prune"] = -0.2 * len(removed)
        if not self.rolled_back:
            terms["auto_prune"] = 0.0
        terms["pbrs"] = self.pbrs(0.3, 0.3)
        terms["clawback"] = self.clawback()
        terms["hindsight"] = self.hindsight()
        if self.config.disable_pbrs:
            del terms["pbrs"]
        if self.config.disable_terminal_reward:
            del terms["terminal"]
        if self.config.disable_anti_gaming:
            del terms["shock"]
        return terms

    # -- attribution -----------------------------------------------------------------------------

    def contribution(self, slot: int) -> float | None:
        value = self.before.contribution[slot]
        return None if math.isnan(value) else value

    def improvement(self, slot: int) -> float:
        return float(self.before.val_score - self.seeds[slot].first)

    def regress_discount(self, slot: int) -> float:
        improvement = self.improvement(slot)
        if improvement >= 0:
            return 1.0
        return 1 / (1 + math.exp(min(-3 * improvement, 700)))

    def ransomware(self, slot: int) -> float:
        worth, improvement = self.contribution(slot), self.improvement(slot)
        if self.config.disable_anti_gaming or worth is None or worth <= 1:
            return 0.0
        if self.regress_discount(slot) < 0.5:
            return 0.0
        if improvement > 0.1:
            excess = worth / improvement - 5
            if excess <= 0:
                return 0.0
            return -min(0.3, 0.1 * excess / 5)
        return -0.3 * min(1.0, worth / 10)

    def timing_discount(self, slot: int) -> float:
        germinated = self.before.epoch - self.before.age[slot]
        if self.config.disable_timing_discount or germinated >= 10:
            return 1.0
        return 0.4 + 0.6 * germinated / 10

    def bounded(self, worth: float, progress: float | None, combination: str) -> float:
        if progress is None:
            return 0.5 * worth
        if progress <= 0:
            return 0.0
        if worth < progress:
            return worth
        if combination == "harmonic":
            return 2 * progress * worth / (progress + worth)
        return math.sqrt(progress * worth) if combination == "geometric" else progress

    def attribution_of(self, slot: int) -> float:
        worth, seed = self.contribution(slot), self.seeds[slot]
        is_pruned = self.op == PRUNE and slot == self.slot
        account = seed.paid * len(self.live)
        if worth is None:
            proxy = 0.3 * max(self.last_change(), 0.0)
            if not is_pruned:
                return 0.0 if self.fossilizes_harm(slot) else proxy
            return -proxy - max(account, 0.0)
        if worth < 0:
            if not is_pruned:
                return 0.0 if self.fossilizes_harm(slot) else worth
            return min(-worth, max(-account, 0.0))
        if self.fossilizes_harm(slot):
            return 0.0
        progress = None if seed.before is None else self.before.val_score - seed.before
        earned = self.bounded(worth, progress, self.config.combination)
        earned *= self.regress_discount(slot)
        sign = -1 if is_pruned else 1
        return (sign * earned + self.ransomware(slot)) * self.timing_discount(slot)

    def fossilizes_harm(self, slot: int) -> bool:
        return self.op == FOSSILIZE and slot == self.slot and self.improvement(slot) < 0

    def last_change(self) -> float:
        newest, older = self.before.score_history[-1], self.before.score_history[-2]
        return 0.0 if math.isnan(older) else newest - older

    def move_balance(self, slot: int) -> float:
        seed = self.seeds[slot]
        worth, held = self.contribution(slot), seed.balance
        is_pruned = self.op == PRUNE and slot == self.slot
        if is_pruned or self.after.stage[slot] not in MODULE:
            seed.balance = 0.0
            return float(-held)
        fading = self.before.alpha_mode[slot] == 2 and self.before.alpha_target[slot] <= 0
        if slot not in self.live or worth is None or fading:
            return 0.0
        if worth < 0:
            seed.balance = 0.0
            return worth - held
        scores = [s for s in self.before.score_history[-3:] if s == s]
        progress = None if seed.before is None else min(scores) - seed.before
        goal = max(0.0, self.bounded(worth, progress, "geometric") + self.ransomware(slot))
        change = max(-2, min(2, goal - held))
        if self.fossilizes_harm(slot):
            change = min(change, 0.0)
        seed.balance = held + change
        return change

    # -- other terms -----------------------------------------------------------------------------

    def blending_of(self, slot: int) -> float:
        if self.before.stage[slot] != BLENDING or self.improvement(slot) >= 0:
            return 0.0
        epochs = self.before.epochs_in_stage[slot]
        return -0.1 - min(0.05 * epochs, 0.3)

    def holding_of(self, slot: int) -> float:
        epochs = self.before.epochs_in_stage[slot]
        if self.before.stage[slot] != HOLDING or epochs < 2:
            return 0.0
        if self.op in (FOSSILIZE, PRUNE) and slot == self.slot:
            return 0.0
        if self.attribution_of(slot) <= NOTHING:
            return 0.0
        return -min(0.1 + 0.05 * (epochs - 2), 0.3)

    def synergy_of(self, slot: int) -> float:
        total = sum(self.before.interaction[slot])
        if self.regress_discount(slot) < 0.5 or total <= 0:
            return 0.0
        if self.attribution_of(slot) <= NOTHING:
            return 0.0
        return 0.1 * math.tanh(0.5 * total)

    def pbrs(self, scale: float, rate: float) -> float:
        later = 0.0 if self.ended else self.potential(self.after, rate)
        return scale * (self.config.gamma * later - self.potential(self.before, rate))

    def potential(self, signals: Any, rate: float) -> float:
        levels = {GERMINATED: 1.0, TRAINING: 2.0, BLENDING: 3.5, HOLDING: 5.5, FOSSIL: 6.0}
        return sum(
            levels[stage] + min(rate * epochs, 2)
            for stage, epochs in zip(signals.stage, signals.epochs_in_stage, strict=True)
            if stage in levels
        )

    def effective_params(self) -> float:
        after = self.after
        return sum(
            0.0039 * after.host_params + alpha * size
            for stage, alpha, size in zip(after.stage, after.alpha, after.slot_params, strict=True)
            if stage in BLENDED
        )

    def rent(self) -> float:
        growth = self.effective_params() / max(self.after.host_params, 200)
        return -min(0.5 * math.log1p(growth), 1.5)

    def shock(self) -> float:
        host = max(self.before.host_params, 200)
        cost = 0.1958 * sum(
            (now - then) ** 2 * size / host
            for now, then, size in zip(
                self.after.alpha, self.before.alpha, self.before.slot_params, strict=True
            )
        )
        return -min(cost, 1.0)

    def occupancy(self) -> float:
        seeds = sum(stage in MODULE for stage in self.after.stage)
        fossils = self.after.stage.count(FOSSIL)
        return -0.01 * max(0, seeds - 1) - 0.002 * fossils

    def is_first(self) -> bool:
        return self.op == GERMINATE and self.germinations == 0

    def first_germination(self) -> float:
        return 0.2 if self.is_first() else 0.0

    def clawback(self) -> float:
        slot = self.slot if self.is_first() else self.first_slot
        if slot is None or (self.is_first() and self.rolled_back):
            return 0.0
        gone = self.after.stage[slot] not in MODULE
        unripe = self.ended and self.after.stage[slot] in (GERMINATED, TRAINING)
        if not gone and not unripe:
            return 0.0
        age = 0 if self.is_first() else self.before.age[slot]
        return -0.2 / self.config.gamma**age

    def action(self) -> float:
        if self.op in (WAIT, ADVANCE):
            return 0.0
        if self.op == GERMINATE:
            return -0.15
        if self.op == SET_ALPHA:
            return -0.005
        if self.op == FOSSILIZE:
            return -0.01 + self.fossilize(self.slot)
        return -0.005 + self.prune(self.slot)

    def fossilize(self, slot: int) -> float:
        worth, improvement = self.contribution(slot), self.improvement(slot)
        if improvement < 0:
            cost = 0.5 + min(0.2 * -improvement, 1.0)
            if worth is not None and worth > 0.1:
                cost += 0.3 * (improvement < -0.2)
            return -cost
        if worth is not None and worth >= 1:
            return (0.5 + 0.1 * worth) * min(1.0, self.before.epochs_in_stage[slot] / 5)
        return -0.2

    def prune(self, slot: int) -> float:
        worth, age = self.contribution(slot), self.before.age[slot]
        if worth is None:
            return -0.1 if age < 5 else 0.0
        if worth < -0.5:
            return 0.15 if age >= 3 else -0.1
        if worth < 0:
            return 0.1
        return -min(0.3 + 0.05 * worth, 0.9)

    def count_contributing(self) -> int:
        kept = {slot for slot in self.contributing if self.after.stage[slot] in MODULE}
        return len(kept | ({self.slot} if self.contributes_now() else set()))

    def contributes_now(self) -> bool:
        if self.op != FOSSILIZE:
            return False
        worth = self.contribution(self.slot)
        enough = self.improvement(self.slot) >= 1
        return enough and worth is not None and worth >= 0

    def terminal(self) -> float:
        if not self.is_last:
            return 0.0
        return 0.05 * self.after.val_score + 3 * math.tanh(self.count_contributing() / 3)

    def committed_terminal(self) -> float:
        after = self.after
        if not self.is_last:
            return 0.0
        live = [s for s, stage in enumerate(after.stage) if stage in LIVE]
        score = after.val_score
        for i in live:
            score -= 0.0 if math.isnan(after.contribution[i]) else after.contribution[i]
            score += sum(after.interaction[i][j] for j in live) / 2
        fossil = sum(
            size
            for stage, size in zip(after.stage, after.slot_params, strict=True)
            if stage == FOSSIL
        )
        value = score / 100 - 0.1 * fossil / after.budget
        return self.config.sparse.scale * max(-1.0, min(1.0, value))

    def hindsight(self) -> float:
        return self.pending + (self.credit()[0] if self.ended else 0.0)

    def credit(self) -> tuple[float, int, float]:
        """What this step earns in hindsight, from how many scaffolds, with what mean delay."""
        if self.op != FOSSILIZE or self.improvement(self.slot) <= 0:
            return 0.0, 0, math.nan
        total, scaffolds, delays = 0.0, set(), []
        for scaffold, beneficiary, epoch, boost in self.ledger:
            if beneficiary != self.slot:
                continue
            size = math.tanh(0.1 * boost * self.improvement(self.slot))
            delay = self.before.epoch - epoch
            total += 0.1 * size * self.config.gamma**delay
            scaffolds.add(scaffold)
            delays.append(delay)
        return min(total, 0.2), len(scaffolds), mean(delays) if delays else math.nan

    def gain_now(self) -> float:
        if not self.has_parted and not self.takes_part():
            return 0.0
        return float(self.after.val_score - self.twin)

    def takes_part(self) -> bool:
        return any(float(alpha) > 0 for alpha in self.after.alpha)

    # -- memory ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Remember what later steps need."""
        self.pending = 0.0 if self.ended else self.credit()[0]
        slot = self.slot if self.is_first() else self.first_slot
        failed = self.clawback() != 0 or self.ended
        self.first_slot = None if slot is not None and failed else slot
        if self.op == FOSSILIZE:
            self.ledger = [entry for entry in self.ledger if entry[1] != self.slot]
        if self.contributes_now():
            self.contributing.add(self.slot)
        self.has_parted = self.has_parted or self.takes_part()
        self.germinations += self.op == GERMINATE
        for slot, stage in enumerate(self.after.stage):
            if stage in MODULE and slot not in self.seeds:
                self.seeds[slot] = self.record(self.before.val_score, self.after.val_score)
            elif stage not in MODULE:
                self.seeds.pop(slot, None)
                self.contributing.discard(slot)
                self.ledger = [entry for entry in self.ledger if entry[1] != slot]
        for i, boosts in enumerate(self.after.interaction):
            for j, boost in enumerate(boosts):
                fossilized_now = self.op == FOSSILIZE and j == self.slot
                if boost > 0 and j in self.seeds and not fossilized_now:
                    self.ledger.append((i, j, self.after.epoch, boost))


def mean(values: list[Any]) -> float:
    return float(sum(values) / len(values))


def mean_or_zero(values: list[float]) -> float:
    return mean(values) if values else 0.0
