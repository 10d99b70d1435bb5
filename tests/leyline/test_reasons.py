"""Why nothing grew, told from the records of a run alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from esper.leyline.reasons import Why, is_grown, static_warning, why_not_grown
from esper.leyline.records import DecisionRecord, EpochRecord, SlotRecord, seeds_at_end
from tests.nissa.report.runs import growing_run, summary_of

NONE = {
    "style": None,
    "tempo": None,
    "alpha_target": None,
    "alpha_speed": None,
    "alpha_curve": None,
}


def epoch(
    number: int,
    op: str | None = "WAIT",
    reason: str = "",
    stage: str = "DORMANT",
    rollback: str | None = None,
) -> EpochRecord:
    slot = SlotRecord(
        name="a",
        stage=stage,
        blueprint=None if stage == "DORMANT" else "norm",
        alpha=0.0,
        alpha_target=0.0,
        parameters=0 if stage == "DORMANT" else 9,
        flops=0,
        epochs_in_stage=0,
        age=0,
        contribution=None,
        contribution_se=None,
    )
    decision = None
    if op is not None:
        acts = op != "WAIT"
        decision = DecisionRecord(
            op=op,
            slot="a" if acts else None,
            blueprint="norm" if op == "GERMINATE" else None,
            outcome="done",
            reason=reason,
            **NONE,
        )
    return EpochRecord(
        epoch=number,
        train_loss=None,
        val_loss=1.0,
        val_score=50.0,
        twin_score=None,
        stabilized=False,
        plateau_epochs=0,
        parameters=100,
        flops=100,
        slots=(slot,),
        decision=decision,
        seconds=0.0,
        rollback=rollback,
    )


def test_waiting_is_counted_by_its_reasons_and_answered_with_advice() -> None:
    history = [
        *(epoch(n, reason=Why.NOT_SETTLED) for n in (1, 2, 3)),
        epoch(4, reason=Why.NO_PLATEAU),
        epoch(5, None),
    ]
    first, last = why_not_grown(history)
    assert first == (
        "Nothing grew: the controller waited in 4 of 4 decisions: 3 because the network had not "
        "settled yet, 1 because its score was still improving."
    )
    assert last.startswith("To change that: train for more epochs")


def test_limits_are_named() -> None:
    reason = f"{Why.FULL}: the limit of seeds is reached; raise max_seeds"
    first, last = why_not_grown([epoch(1, reason=reason), epoch(2, None)])
    assert "1 because no slot could take a seed: the limit of seeds is reached" in first
    assert "raise the limits" in last


def test_a_prune_a_rollback_and_a_seed_that_came_too_late_are_told() -> None:
    lived = [epoch(1, "GERMINATE"), epoch(2, "PRUNE", Why.HARM, "TRAINING"), epoch(3, None)]
    pruned, advice = why_not_grown(lived)
    assert pruned == "Nothing grew: the norm at a was pruned at epoch 2 because it did harm."
    assert advice.startswith("To change that: name other slots")
    rolled = [
        epoch(1, "GERMINATE"),
        epoch(2, stage="TRAINING", rollback="divergence"),
        epoch(3, None),
    ]
    told = "Nothing grew: the norm at a was pruned at epoch 2 by a rollback (divergence)."
    assert told in why_not_grown(rolled)
    late = [epoch(1, "GERMINATE"), epoch(2, None, stage="GERMINATED")]
    dropped, advice = why_not_grown(late)
    assert dropped == (
        "Nothing grew: the norm at a, germinated at epoch 1, was not yet blended in when the run "
        "ended, and was dropped."
    )
    assert advice.startswith("To change that: train for more epochs")
    twice = [*lived[:2], epoch(3, "GERMINATE"), epoch(4, "PRUNE", Why.HARM, "TRAINING")]
    (told, _) = why_not_grown([*twice, epoch(5, None)])
    assert told == (
        "Nothing grew: 2 seeds were tried, and the last, the norm at a, was pruned at epoch 4 "
        "because it did harm."
    )


def test_of_many_reasons_to_wait_the_two_most_frequent_are_named() -> None:
    reasons = [Why.NOT_SETTLED] * 3 + [Why.RESTING] + [Why.NO_PLATEAU] * 2
    history = [
        epoch(number, reason=f"{reason} (figure {number})")
        for number, reason in enumerate(reasons, start=1)
    ]
    first, _ = why_not_grown([*history, epoch(7, None)])
    assert first == (
        "Nothing grew: the controller waited in 6 of 6 decisions: 3 because the network had not "
        "settled yet (at last: figure 3), 2 because its score was still improving."
    )


def test_where_something_grew_there_is_nothing_to_tell() -> None:
    history = [epoch(1, "GERMINATE"), epoch(2, None, stage="HOLDING")]
    assert why_not_grown(history) == ()
    assert is_grown(seeds_at_end(history))
    assert why_not_grown([]) == ()
    assert (
        "the run ended after epoch 1, before the first decision; train"
        in why_not_grown([epoch(1, None)])[0]
    )


def test_a_seed_that_the_end_caught_on_its_way_is_told_with_how_far_it_came() -> None:
    last = epoch(2, None, stage="BLENDING")

    def at(alpha: float, target: float) -> tuple[str, ...]:
        slot = replace(last.slots[0], alpha=alpha, alpha_target=target)
        return why_not_grown([epoch(1, "GERMINATE"), replace(last, slots=(slot,))])

    assert at(0.2, 0.5) == (
        "The norm at a was still being blended in when the run ended, at 40% of its amplitude.",
        "To change that: train for more epochs.",
    )
    # At its amplitude, or as good as there; or on its way out.
    assert at(0.5, 0.5) == at(0.99, 1.0) == at(0.5, 0.0) == ()


def test_a_seed_that_was_pruned_after_the_kept_epoch_is_told() -> None:
    history = [
        epoch(1, "GERMINATE"),
        replace(epoch(2, "PRUNE", f"{Why.WORTHLESS} (+0.75 points)", "HOLDING"), val_score=51.0),
        replace(epoch(3, None), val_score=49.0),
    ]
    told = (
        "The returned network is that of epoch 2, the best validated (51.00), and holds the norm "
        "at a (9 parameters), which was pruned at epoch 2 because it was worth too little (+0.75 "
        "points); keep='last' returns that of epoch 3 without it (49.00).",
    )
    assert why_not_grown(history, 2) == told
    assert why_not_grown(history, 1)[0].startswith("Nothing grew")
    # A run that stops after the decision, before an epoch without the seed is measured.
    stopped = why_not_grown(history[:2], 2, "stopped")
    assert len(stopped) == 1
    assert stopped[0].endswith("pruned at epoch 2 because it was worth too little (+0.75 points).")
    # A seed that is part of the network for good, and one that the kept network lacks.
    fossil = [*history[:1], epoch(2, stage="FOSSILIZED"), epoch(3, None, stage="FOSSILIZED")]
    assert why_not_grown(fossil, 2) == ()


def test_a_seed_that_a_gate_held_back_says_what_the_gate_wanted() -> None:
    refused = [
        replace(record, decision=replace(record.decision, outcome="gate_failed"))
        for record in (
            epoch(number, "ADVANCE", f"ADVANCE at a: gate G2 waits, {number} are over", "TRAINING")
            for number in (2, 3)
        )
        if record.decision is not None
    ]
    history = [epoch(1, "GERMINATE"), *refused, epoch(4, None, stage="TRAINING")]
    told = why_not_grown(history)
    assert (
        "was dropped; it was held back 2 times, at last because gate G2 waits, 3 are over."
        in told[0]
    )


def test_a_seed_that_was_held_back_once_says_so() -> None:
    refused = epoch(2, "ADVANCE", "ADVANCE at a: gate G2 waits, 1 is over", "TRAINING")
    assert refused.decision is not None
    refused = replace(refused, decision=replace(refused.decision, outcome="gate_failed"))
    told = why_not_grown([epoch(1, "GERMINATE"), refused, epoch(3, None, stage="TRAINING")])
    assert "was dropped; it was held back once because gate G2 waits, 1 is over." in told[0]


def test_a_seed_that_still_learned_in_the_kept_epoch_and_was_pruned_later_was_pruned() -> None:
    history = [
        epoch(1, "GERMINATE"),
        replace(epoch(2, "ADVANCE", stage="TRAINING"), val_score=51.0),
        epoch(3, "PRUNE", f"{Why.WORTHLESS} (-1.50 points)", "HOLDING"),
        epoch(4, None),
    ]
    (seed,) = seeds_at_end(history, 2)
    assert (seed.fate, seed.ended) == ("pruned", 3)
    assert why_not_grown(history, 2) == (
        "Nothing grew: the norm at a was pruned at epoch 3 because it was worth too little (-1.50 "
        "points).",
        "To change that: name other slots (esper.suggest_slots(model, example) finds some) or "
        "write controller='heuristic', unless the network has all it needs.",
    )


def test_what_grew_after_the_epoch_that_is_kept_is_not_part_of_the_result() -> None:
    history = [
        epoch(1, "GERMINATE"),
        epoch(2, stage="TRAINING"),
        epoch(3, stage="HOLDING"),
        epoch(4, None, stage="HOLDING"),
    ]
    assert [seed.fate for seed in seeds_at_end(history)] == ["holding"]
    assert why_not_grown(history, 3) == why_not_grown(history) == ()
    for kept in (1, 2):
        (seed,) = seeds_at_end(history, kept)
        assert (seed.fate, seed.ended) == ("dropped", 4)
        assert why_not_grown(history, kept) == (
            f"Nothing that grew was kept: the best validation score is that of epoch {kept}, "
            "before the norm at a had any effect; keep='last' returns the network of epoch 4.",
        )


def test_a_seed_that_was_pruned_after_the_epoch_that_is_kept_lives_in_the_result() -> None:
    history = [
        epoch(1, "GERMINATE"),
        epoch(2, stage="BLENDING"),
        epoch(3, "PRUNE", stage="HOLDING"),
        epoch(4, None, stage="PRUNED"),
    ]
    assert [(seed.fate, seed.ended) for seed in seeds_at_end(history, 3)] == [("holding", None)]
    assert [(seed.fate, seed.ended) for seed in seeds_at_end(history)] == [("pruned", 3)]
    assert [(seed.fate, seed.ended) for seed in seeds_at_end(history, 1)] == [("pruned", 3)]


def test_a_seed_half_blended_in_is_told_of_the_epoch_that_is_kept() -> None:
    half = epoch(2, stage="BLENDING")
    slot = replace(half.slots[0], alpha=0.4, alpha_target=1.0)
    history = [epoch(1, "GERMINATE"), replace(half, slots=(slot,)), epoch(3, None, stage="HOLDING")]
    assert why_not_grown(history) == ()
    told, advice = why_not_grown(history, 2)
    assert told == (
        "The norm at a was still being blended in at epoch 2, whose network is kept, at 40% of its "
        "amplitude."
    )
    assert "keep='last'" in advice


def test_a_run_that_stopped_names_what_it_left_half_way() -> None:
    history = [epoch(1, "GERMINATE"), epoch(2, stage="TRAINING")]
    told = why_not_grown(history, 1, "no better validation score in 1 epochs")
    assert told[0] == (
        "The run stopped after epoch 2 (no better validation score in 1 epochs), when the norm at "
        "a was still learning."
    )
    assert "The run stopped" not in " ".join(why_not_grown([epoch(1)], 1, "enough"))


def test_a_network_at_chance_is_said_not_to_learn() -> None:
    guessing = [replace(epoch(n), val_loss=2.302, val_score=10.0 + n % 2) for n in range(1, 11)]
    (line, *_) = why_not_grown(guessing, chance_loss=math.log(10))
    assert line == (
        "The network did not learn: its best validation loss in 10 epochs was 2.302, and guessing "
        "gives 2.303; check the data, the loss and the learning rate before anything grows."
    )
    # Neither a lower loss nor many more right answers are guessing; nor are nine epochs enough.
    for learned in (
        [*guessing[:-1], replace(guessing[-1], val_loss=2.0)],
        [replace(record, val_score=40.0 + record.epoch) for record in guessing],
        guessing[:9],
    ):
        assert not any(
            "did not learn" in line for line in why_not_grown(learned, chance_loss=math.log(10))
        )


def test_a_loss_that_never_fell_is_told_where_nobody_knows_what_guessing_costs() -> None:
    flat = [replace(epoch(n), val_loss=4.0 - n / 1e5, val_score=-4.0) for n in range(1, 11)]
    (line, *_) = why_not_grown(flat)
    assert line == (
        "The validation loss did not fall: it was 4 after the first epoch and 4 at best in 10; "
        "check the data, the loss and the learning rate before anything grows."
    )
    for learned in ([*flat[:-1], replace(flat[-1], val_loss=3.9)], flat[:9]):
        assert not any("did not fall" in line for line in why_not_grown(learned))
    negative = [replace(epoch(n), val_loss=-1.0 - n, val_score=1.0 + n) for n in range(1, 11)]
    assert not any("did not fall" in line for line in why_not_grown(negative))


def test_a_seed_without_effect_is_dropped_and_named() -> None:
    last = epoch(5, op=None, stage="HOLDING")
    idle = replace(last.slots[0], contribution=0.0, contribution_se=0.0, alpha=1.0)
    history = [epoch(4, op="GERMINATE"), replace(last, slots=(idle,))]
    (seed,) = seeds_at_end(history)
    assert seed.fate == "dropped"
    told = " ".join(why_not_grown(history))
    assert "The norm at a made no difference (a contribution of 0 ± 0), and was dropped" in told
    assert "not yet blended in" not in told
    useful = replace(idle, contribution_se=0.2)
    assert seeds_at_end([history[0], replace(last, slots=(useful,))])[0].fate == "holding"
    kept = replace(idle, stage="FOSSILIZED")
    assert seeds_at_end([history[0], replace(last, slots=(kept,))])[0].fate == "fossilized"


# ---- Whether a static network is likely to do as well


def warning(gain: tuple[float, float] | None, lost: tuple[float, float], **changes: Any) -> str:
    history = growing_run()
    summary = replace(
        summary_of(history), **{"parameters_before": 100, "parameters_after": 200, **changes}
    )
    return static_warning(history, summary, gain, lost)


def test_a_gain_within_its_error_is_told() -> None:
    much, little = (5.0, 0.5), (0.28, 0.6)
    assert warning(much, much) == ""
    told = warning(little, much)
    assert told == (
        "A static network of the same size (200 parameters) is likely to do as well: the "
        "validation gain over the twin is +0.28 points (standard error 0.60); in Python, "
        "grown.compare_static() trains one."
    )
    # Without a twin it is what all seeds give together.
    assert warning(None, much) == ""
    assert "would fall by only 0.28 points (standard error 0.60)" in warning(None, little)
    assert "would rise by 0.50 points (standard error 0.60)" in warning(None, (-0.5, 0.6))
    assert warning(little, much, parameters_after=100) == ""


def test_growth_that_was_over_early_is_told() -> None:
    much = (5.0, 0.5)
    history = [
        replace(record, epoch=record.epoch + 400 * (record.epoch > 59)) for record in growing_run()
    ]
    summary = replace(
        summary_of(history),
        parameters_before=100,
        parameters_after=200,
        epochs=history[-1].epoch,
        kept_epoch=history[-1].epoch,
    )
    told = static_warning(history, summary, much, much)
    assert "in place by epoch " in told
    assert f" of {summary.epochs}, " in told
