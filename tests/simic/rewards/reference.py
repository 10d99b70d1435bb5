"""Rewards of one row in plain numbers: what the vectorised terms must agree with.

Written to be read beside docs/rewards.md, one rule after the other; slow and simple.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

from esper.leyline.signals import Signals
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.contract import Transition

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
        self.asked = int(transition.actions["op"][row])
        self.slot = int(transition.actions["slot"][row])
        self.op = self.asked if self.after.last_success else WAIT
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
        recent = [*self.gains, now][-config.final_epochs :]
        counted = mean(recent) if self.is_last else now
        if self.rolled_back:
            terms = {"gain": -self.gain / config.scale, "rent": 0.0}
        else:
            added = (self.after.params - self.after.host_params) / self.after.host_params
            flops = (self.after.flops - self.after.host_flops) / self.after.host_flops
            points = config.rent_points * added + config.flop_rent_points * flops
            steps = self.after.max_epochs - 1
            terms = {
                "gain": (self.config.gamma * counted - self.gain) / config.scale,
                "rent": -points / steps / config.scale,
            }
        undecided = sum(stage in LIVE for stage in self.after.stage)
        settles = self.is_last and not self.rolled_back
        terms["terminal"] = -config.open_seed_cost * undecided if settles else 0.0
        terms["rollback"] = -config.rollback_penalty if self.rolled_back else 0.0
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
        config = self.config.sparse
        young = self.op == PRUNE and self.before.age[self.slot] < config.early_age
        action = -config.early_prune if young else 0.0
        return self.with_rollback({"action": action, "terminal": self.committed_terminal()})

    def mode_basic(self) -> dict[str, float]:
        config = self.config.basic
        change = self.after.val_score - self.before.val_score
        used = self.effective_params()
        return self.with_rollback(
            {
                "gain": config.score_weight * change / 100,
                "rent": -config.param_weight * used / self.after.budget,
            }
        )

    def mode_simplified(self) -> dict[str, float]:
        config = self.config.simplified
        terminal = 0.0
        if self.is_last:
            terminal = config.score_weight * self.after.val_score / 100
            terminal += config.fossil_bonus * self.count_contributing()
        action = -config.action_cost if self.op != WAIT else 0.0
        terms = self.with_rollback({"action": action, "terminal": terminal})
        terms["pbrs"] = self.pbrs(self.config.potential.scale, self.config.potential.progress_rate)
        return terms

    def mode_loss(self) -> dict[str, float]:
        config = self.config.loss
        fall = (self.before.val_loss - self.after.val_loss) / config.typical_change
        fall = max(-config.limit, min(config.limit, fall))
        if fall < 0:
            fall *= config.regress_share
        paying = [
            slot
            for slot, (stage, age) in enumerate(zip(self.after.stage, self.after.age, strict=True))
            if stage in MODULE and age > config.rent_free
        ]
        grown = sum(self.after.slot_params[slot] for slot in paying)
        flops = sum(self.after.slot_flops[slot] for slot in paying)
        rent = config.rent_weight * math.log1p(grown / self.after.host_params)
        rent += config.flop_rent_weight * math.log1p(flops / self.after.host_flops)
        terminal = 0.0
        if self.is_last:
            share = (config.baseline - self.after.val_loss) / (config.baseline - config.target)
            terminal = max(0.0, min(1.0, share))
        terms = self.with_rollback(
            {
                "gain": config.weight * fall,
                "rent": -min(rent, config.rent_limit),
                "terminal": terminal,
            }
        )
        terms["pbrs"] = self.pbrs(config.potential_scale, 0.0)
        return terms

    def with_rollback(self, terms: dict[str, float]) -> dict[str, float]:
        """A rollback replaces everything a step would have paid."""
        if self.rolled_back:
            terms = dict.fromkeys(terms, 0.0)
        terms["rollback"] = -self.config.governor.rollback_penalty if self.rolled_back else 0.0
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
        terms["auto_prune"] = -self.config.governor.auto_prune * len(removed)
        if not self.rolled_back:
            terms["auto_prune"] = 0.0
        terms["pbrs"] = self.pbrs(self.config.potential.scale, self.config.potential.progress_rate)
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
        steep = self.config.attribution.regress_steepness
        return 1 / (1 + math.exp(min(-steep * improvement, 700)))

    def ransomware(self, slot: int) -> float:
        config = self.config.ransomware
        worth, improvement = self.contribution(slot), self.improvement(slot)
        if self.config.disable_anti_gaming or worth is None or worth <= config.min_contribution:
            return 0.0
        if self.regress_discount(slot) < config.min_discount:
            return 0.0
        if improvement > config.min_improvement:
            excess = worth / improvement - config.max_ratio
            if excess <= 0:
                return 0.0
            return -min(config.limit, config.ratio_weight * excess / config.max_ratio)
        return -config.limit * min(1.0, worth / config.contribution_scale)

    def timing_discount(self, slot: int) -> float:
        config = self.config.timing
        if self.config.disable_timing_discount or config.epochs == 0:
            return 1.0
        germinated = self.before.epoch - self.before.age[slot]
        if germinated >= config.epochs:
            return 1.0
        return config.least + (1 - config.least) * germinated / config.epochs

    def bounded(self, worth: float, progress: float | None, combination: str) -> float:
        if progress is None:
            return self.config.attribution.unknown_share * worth
        if progress <= 0:
            return 0.0
        if worth < progress:
            return worth
        if combination == "harmonic":
            return 2 * progress * worth / (progress + worth)
        return math.sqrt(progress * worth) if combination == "geometric" else progress

    def attribution_of(self, slot: int) -> float:
        config = self.config.attribution
        worth, seed = self.contribution(slot), self.seeds[slot]
        is_pruned = self.op == PRUNE and slot == self.slot
        account = seed.paid * len(self.live)
        if worth is None:
            proxy = config.proxy_weight * max(self.last_change(), 0.0)
            if not is_pruned:
                return 0.0 if self.fossilizes_harm(slot) else proxy
            return -proxy - (max(account, 0.0) if config.settles_prunes else 0.0)
        if worth < 0:
            if not is_pruned:
                return 0.0 if self.fossilizes_harm(slot) else worth
            return min(-worth, max(-account, 0.0)) if config.settles_prunes else -worth
        if self.fossilizes_harm(slot):
            return 0.0
        progress = None if seed.before is None else self.before.val_score - seed.before
        earned = self.bounded(worth, progress, config.combination) * self.regress_discount(slot)
        sign = -1 if is_pruned else 1
        return (sign * earned + self.ransomware(slot)) * self.timing_discount(slot)

    def fossilizes_harm(self, slot: int) -> bool:
        return self.op == FOSSILIZE and slot == self.slot and self.improvement(slot) < 0

    def last_change(self) -> float:
        newest, older = self.before.score_history[-1], self.before.score_history[-2]
        return 0.0 if math.isnan(older) else newest - older

    def move_balance(self, slot: int) -> float:
        config, seed = self.config.escrow, self.seeds[slot]
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
        scores = [s for s in self.before.score_history[-config.stable_epochs :] if s == s]
        progress = None if seed.before is None else min(scores) - seed.before
        goal = max(0.0, self.bounded(worth, progress, config.combination) + self.ransomware(slot))
        change = max(-config.max_change, min(config.max_change, goal - held))
        if self.fossilizes_harm(slot):
            change = min(change, 0.0)
        seed.balance = held + change
        return change

    # -- other terms -----------------------------------------------------------------------------

    def blending_of(self, slot: int) -> float:
        config = self.config.warning
        if self.before.stage[slot] != BLENDING or self.improvement(slot) >= 0:
            return 0.0
        epochs = self.before.epochs_in_stage[slot]
        return -config.blending_base - min(config.blending_slope * epochs, config.blending_limit)

    def holding_of(self, slot: int) -> float:
        config = self.config.warning
        epochs = self.before.epochs_in_stage[slot]
        if self.before.stage[slot] != HOLDING or epochs < config.holding_free:
            return 0.0
        if config.holding_ops == "wait" and self.op != WAIT:
            return 0.0
        if self.op in (FOSSILIZE, PRUNE) and slot == self.slot:
            return 0.0
        if self.attribution_of(slot) <= NOTHING:
            return 0.0
        cost = config.holding_base + config.holding_slope * (epochs - config.holding_free)
        return -min(cost, config.holding_limit)

    def synergy_of(self, slot: int) -> float:
        config = self.config.synergy
        total = sum(self.before.interaction[slot])
        if self.regress_discount(slot) < config.min_discount or total <= 0:
            return 0.0
        if self.attribution_of(slot) <= NOTHING:
            return 0.0
        return config.weight * math.tanh(config.steepness * total)

    def pbrs(self, scale: float, rate: float) -> float:
        later = 0.0 if self.ended else self.potential(self.after, rate)
        return scale * (self.config.gamma * later - self.potential(self.before, rate))

    def potential(self, signals: Any, rate: float) -> float:
        config = self.config.potential
        levels = {
            GERMINATED: config.germinated,
            TRAINING: config.training,
            BLENDING: config.blending,
            HOLDING: config.holding,
            FOSSIL: config.fossilized,
        }
        return sum(
            levels[stage] + min(rate * epochs, config.progress_limit)
            for stage, epochs in zip(signals.stage, signals.epochs_in_stage, strict=True)
            if stage in levels
        )

    def effective_params(self) -> float:
        after = self.after
        return sum(
            self.config.rent.slot_share * after.host_params + alpha * size
            for stage, alpha, size in zip(after.stage, after.alpha, after.slot_params, strict=True)
            if stage in BLENDED
        )

    def rent(self) -> float:
        config = self.config.rent
        after = self.after
        growth = self.effective_params() / max(after.host_params, config.min_host, 1)
        flops = sum(
            alpha * flops
            for stage, alpha, flops in zip(after.stage, after.alpha, after.slot_flops, strict=True)
            if stage in BLENDED
        )
        rent = config.weight * math.log1p(growth)
        rent += config.flop_weight * math.log1p(flops / after.host_flops)
        return -min(rent, config.limit)

    def shock(self) -> float:
        config = self.config.shock
        host = max(self.before.host_params, config.min_host, 1)
        cost = config.weight * sum(
            (now - then) ** 2 * size / host
            for now, then, size in zip(
                self.after.alpha, self.before.alpha, self.before.slot_params, strict=True
            )
        )
        return -cost if config.limit is None else -min(cost, config.limit)

    def occupancy(self) -> float:
        config = self.config.occupancy
        seeds = sum(stage in MODULE for stage in self.after.stage)
        fossils = self.after.stage.count(FOSSIL)
        return -config.per_seed * max(0, seeds - config.free_seeds) - config.per_fossil * fossils

    def is_first(self) -> bool:
        return self.op == GERMINATE and self.germinations == 0

    def first_germination(self) -> float:
        return self.config.first_germination.bonus if self.is_first() else 0.0

    def clawback(self) -> float:
        config = self.config.first_germination
        slot = self.slot if self.is_first() else self.first_slot
        if slot is None or not config.is_returned or (self.is_first() and self.rolled_back):
            return 0.0
        gone = self.after.stage[slot] not in MODULE
        unripe = self.ended and self.after.stage[slot] in (GERMINATED, TRAINING)
        if not gone and not unripe:
            return 0.0
        age = 0 if self.is_first() else self.before.age[slot]
        return -config.bonus / self.config.gamma**age

    def action(self) -> float:
        config, slot = self.config.operation, self.slot
        if not self.after.last_success and config.punish_refusals:
            return -self.refused()
        if self.op == WAIT:
            return 0.0
        if self.op == GERMINATE:
            return -config.germinate
        if self.op == SET_ALPHA:
            return -config.set_alpha_target
        if self.op == ADVANCE:
            return -config.advance
        if self.op == FOSSILIZE:
            return -config.fossilize + self.fossilize(slot)
        return -config.prune + self.prune(slot)

    def fossilize(self, slot: int) -> float:
        config, guard = self.config.operation, self.config.ransomware
        worth, improvement = self.contribution(slot), self.improvement(slot)
        if improvement < 0:
            cost = config.fossilize_harm
            cost += min(config.fossilize_harm_slope * -improvement, config.fossilize_harm_limit)
            if worth is not None and worth > guard.hostage_contribution:
                cost += config.fossilize_hostage * (improvement < guard.hostage_improvement)
            return -cost
        if worth is not None and worth >= config.fossilize_contribution:
            settled = min(1.0, self.before.epochs_in_stage[slot] / config.fossilize_epochs)
            return (config.fossilize_bonus + config.fossilize_slope * worth) * settled
        return -config.fossilize_idle

    def prune(self, slot: int) -> float:
        config = self.config.operation
        worth, age = self.contribution(slot), self.before.age[slot]
        if worth is None:
            return -config.prune_unknown if age < config.prune_unknown_age else 0.0
        if worth < config.prune_harmful_contribution:
            ripe = age >= config.prune_harmful_age
            return config.prune_harmful if ripe else -config.prune_harmful_young
        if worth < 0:
            return config.prune_useless
        return -min(config.prune_good + config.prune_good_slope * worth, config.prune_good_limit)

    def refused(self) -> float:
        config = self.config.operation
        stage, age = self.before.stage[self.slot], self.before.age[self.slot]
        if self.asked == GERMINATE:
            return config.refused_germinate if stage in MODULE else 0.0
        if self.asked == FOSSILIZE:
            return config.refused_fossilize if stage != HOLDING else 0.0
        if self.asked == PRUNE:
            if stage not in MODULE:
                return config.refused_prune
            if stage == FOSSIL:
                return config.refused_prune_fossil
            return config.refused_prune_young * max(0, config.min_prune_age - age)
        return 0.0

    def count_contributing(self) -> int:
        kept = {slot for slot in self.contributing if self.after.stage[slot] in MODULE}
        return len(kept | ({self.slot} if self.contributes_now() else set()))

    def contributes_now(self) -> bool:
        if self.op != FOSSILIZE:
            return False
        worth = self.contribution(self.slot)
        enough = self.improvement(self.slot) >= self.config.terminal.min_improvement
        return enough and worth is not None and worth >= 0

    def terminal(self) -> float:
        config = self.config.terminal
        if not self.is_last:
            return 0.0
        count = self.count_contributing()
        if config.fossil_saturation is None:
            fossils = config.fossil_bonus * count
        else:
            fossils = config.fossil_bonus * math.tanh(count / config.fossil_saturation)
        return config.score_weight * self.after.val_score + fossils

    def committed_terminal(self) -> float:
        config, after = self.config.sparse, self.after
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
        value = score / 100 - config.param_weight * fossil / after.budget
        return config.scale * max(-config.limit, min(config.limit, value))

    def hindsight(self) -> float:
        return self.pending + (self.credit()[0] if self.ended else 0.0)

    def credit(self) -> tuple[float, int, float]:
        """What this step earns in hindsight, from how many scaffolds, with what mean delay."""
        config = self.config.hindsight
        if self.op != FOSSILIZE or self.improvement(self.slot) <= 0:
            return 0.0, 0, math.nan
        total, scaffolds, delays = 0.0, set(), []
        for scaffold, beneficiary, epoch, boost in self.ledger:
            if beneficiary != self.slot:
                continue
            size = math.tanh(config.steepness * boost * self.improvement(self.slot))
            delay = self.before.epoch - epoch
            total += config.weight * size * self.config.gamma**delay
            scaffolds.add(scaffold)
            delays.append(delay)
        return min(total, config.limit), len(scaffolds), mean(delays) if delays else math.nan

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
