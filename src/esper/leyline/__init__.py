"""Leyline: what every other part of Esper agrees on, from stages and rules to the saved form.

Names are looked up when they are first used: a reader of a finished run needs a few of them and
should not wait for PyTorch to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.leyline.actions import (
        CAUSAL_HEADS,
        HEAD_NAMES,
        HEAD_SIZES,
        HEAD_VALUES,
        NUM_OPS,
        PLACEHOLDERS,
        Actions,
        Command,
        LifecycleOp,
        causal_table,
        choice_text,
        decode_actions,
        describe_action,
        head_values,
        placeholder_actions,
    )
    from esper.leyline.alpha import (
        ALPHA_TARGETS,
        SPEED_TICKS,
        STEEPNESS,
        STYLE_SPECS,
        TEMPO_EPOCHS,
        AlphaAlgorithm,
        AlphaCurve,
        AlphaMode,
        BlendStyle,
        StyleSpec,
    )
    from esper.leyline.axes import AXES, AXES_NAMES, USUAL_AXES, Axes, AxesName, parse_axes
    from esper.leyline.blueprints import (
        BLUEPRINT_KINDS,
        BUILTIN_BLUEPRINTS,
        BUILTIN_KINDS,
        NOOP,
        NUM_BLUEPRINTS,
        TOPOLOGIES,
        TOPOLOGY_BY_RANK,
        BlueprintKind,
        Topology,
        channel_axis,
        kinds_of,
    )
    from esper.leyline.config import Config, option
    from esper.leyline.controller import Controller, ControllerContext
    from esper.leyline.defaults import (
        DEFAULT_EPISODE_LENGTH,
        DEFAULT_FEATURE_DIM,
        DEFAULT_GAMMA,
        DEFAULT_LSTM_HIDDEN_DIM,
        ENTROPY_COEF_PER_HEAD,
        ENTROPY_FLOOR_PENALTY_COEF,
        ENTROPY_FLOOR_PER_HEAD,
        PROBABILITY_FLOOR_PER_HEAD,
    )
    from esper.leyline.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        EmptyMaskError,
        EsperError,
        EsperWarning,
        MissingExtraError,
        NonFiniteError,
        OwnCodeError,
        SlotError,
        UnknownNameError,
        UsageError,
        nearest,
        unknown_name,
    )
    from esper.leyline.files import atomic_write_text
    from esper.leyline.lock import WriterLock
    from esper.leyline.manifest import (
        MANIFEST_FILE,
        TENSORS_FILE,
        TREE_FILE,
        Manifest,
        read_manifest,
    )
    from esper.leyline.randomness import derive_seed, generator, seeded
    from esper.leyline.reasons import Explaining, Why, why_nothing_grew
    from esper.leyline.records import (
        DecisionRecord,
        EpochRecord,
        ModuleRecord,
        RunSummary,
        SeedRecord,
        SizeRecord,
        SlotRecord,
        copy_fields,
        seed_records,
    )
    from esper.leyline.registry import Registry
    from esper.leyline.rules import (
        REFUSAL_TEXTS,
        Masks,
        Refusal,
        RulesConfig,
        RuleView,
        build_masks,
        is_in,
        refusals,
        selectable,
    )
    from esper.leyline.settings import SettingChanges, SettingInfo
    from esper.leyline.signals import HISTORY, Signals
    from esper.leyline.slots import SlotConfig, parse_slot_id, slot_id
    from esper.leyline.stages import (
        BLENDED_STAGES,
        COOLDOWN_STAGES,
        DEVELOPING_STAGES,
        EMPTY_STAGES,
        LIVE_STAGES,
        MODULE_STAGES,
        NUM_STAGES,
        STAGE_INDEX,
        TRANSITIONS,
        SeedStage,
        parse_stage,
    )
    from esper.leyline.storage import load_tree, save_tree

__all__ = [
    "ALPHA_TARGETS",
    "AXES",
    "AXES_NAMES",
    "BLENDED_STAGES",
    "BLUEPRINT_KINDS",
    "BUILTIN_BLUEPRINTS",
    "BUILTIN_KINDS",
    "CAUSAL_HEADS",
    "COOLDOWN_STAGES",
    "DEFAULT_EPISODE_LENGTH",
    "DEFAULT_FEATURE_DIM",
    "DEFAULT_GAMMA",
    "DEFAULT_LSTM_HIDDEN_DIM",
    "DEVELOPING_STAGES",
    "EMPTY_STAGES",
    "ENTROPY_COEF_PER_HEAD",
    "ENTROPY_FLOOR_PENALTY_COEF",
    "ENTROPY_FLOOR_PER_HEAD",
    "HEAD_NAMES",
    "HEAD_SIZES",
    "HEAD_VALUES",
    "HISTORY",
    "LIVE_STAGES",
    "MANIFEST_FILE",
    "MODULE_STAGES",
    "NOOP",
    "NUM_BLUEPRINTS",
    "NUM_OPS",
    "NUM_STAGES",
    "PLACEHOLDERS",
    "PROBABILITY_FLOOR_PER_HEAD",
    "REFUSAL_TEXTS",
    "SPEED_TICKS",
    "STAGE_INDEX",
    "STEEPNESS",
    "STYLE_SPECS",
    "TEMPO_EPOCHS",
    "TENSORS_FILE",
    "TOPOLOGIES",
    "TOPOLOGY_BY_RANK",
    "TRANSITIONS",
    "TREE_FILE",
    "USUAL_AXES",
    "Actions",
    "AlphaAlgorithm",
    "AlphaCurve",
    "AlphaMode",
    "Axes",
    "AxesName",
    "BlendStyle",
    "BlueprintKind",
    "CheckpointError",
    "Command",
    "Config",
    "ConfigError",
    "Controller",
    "ControllerContext",
    "DataError",
    "DecisionRecord",
    "EmptyMaskError",
    "EpochRecord",
    "EsperError",
    "EsperWarning",
    "Explaining",
    "LifecycleOp",
    "Manifest",
    "Masks",
    "MissingExtraError",
    "ModuleRecord",
    "NonFiniteError",
    "OwnCodeError",
    "Refusal",
    "Registry",
    "RuleView",
    "RulesConfig",
    "RunSummary",
    "SeedRecord",
    "SeedStage",
    "SettingChanges",
    "SettingInfo",
    "Signals",
    "SizeRecord",
    "SlotConfig",
    "SlotError",
    "SlotRecord",
    "StyleSpec",
    "Topology",
    "UnknownNameError",
    "UsageError",
    "Why",
    "WriterLock",
    "atomic_write_text",
    "build_masks",
    "causal_table",
    "channel_axis",
    "choice_text",
    "copy_fields",
    "decode_actions",
    "derive_seed",
    "describe_action",
    "generator",
    "head_values",
    "is_in",
    "kinds_of",
    "load_tree",
    "nearest",
    "option",
    "parse_axes",
    "parse_slot_id",
    "parse_stage",
    "placeholder_actions",
    "read_manifest",
    "refusals",
    "save_tree",
    "seed_records",
    "seeded",
    "selectable",
    "slot_id",
    "unknown_name",
    "why_nothing_grew",
]

_MODULES = (
    "actions",
    "alpha",
    "axes",
    "blueprints",
    "config",
    "controller",
    "defaults",
    "errors",
    "files",
    "lock",
    "manifest",
    "randomness",
    "reasons",
    "records",
    "registry",
    "rules",
    "settings",
    "signals",
    "slots",
    "stages",
    "storage",
)


def __getattr__(name: str) -> Any:
    """Find a public name in the module that defines it."""
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
