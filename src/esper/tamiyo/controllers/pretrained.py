"""`esper.Tamiyo`: pretrained controllers in folders, and the one that ships with Esper.

    tamiyo = esper.Tamiyo.from_pretrained("tamiyo")       # the shipped one, or a folder
    esper.grow(model, slots, train=train, val=val, controller=tamiyo)
    tamiyo.save_pretrained("my-tamiyo")

A folder has `config.json` (the network, its features and choices with a hash of each, the limits on
growth and the length of runs that it was trained on), `model.safetensors` (weights and observation
statistics), `train_config.json` (how it was trained), `results.json` (what it reached, compared
with what) and `README.md`, the card. Nothing in it is code. A controller with other features or
choices than this version of Esper is refused, with the name of the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper._version import __version__
from esper.leyline.actions import HEAD_VALUES
from esper.leyline.controller import ControllerContext, GrowthLimits
from esper.leyline.errors import CheckpointError, EsperError, UsageError, reason_of, warn
from esper.leyline.rules import Masks
from esper.leyline.signals import Signals
from esper.leyline.slots import TOPOLOGIES
from esper.tamiyo.controllers.learned import LearnedController
from esper.tamiyo.controllers.policy_file import (
    UNUSABLE,
    Policy,
    describe_difference,
    new_policy,
    read_features,
    read_horizon,
)
from esper.tamiyo.controllers.registry import register_controller
from esper.tamiyo.controllers.trial import TrialController
from esper.tamiyo.networks.config import PolicyConfig
from esper.utils.files import write_folder
from esper.utils.manifest import from_json, read_bytes, to_json

MODEL_TYPE = "tamiyo"
SCHEMA = 1
DEFAULT = "tamiyo"
"""The controller that ships with the package."""

_SHIPPED = Path(__file__).parents[1] / "weights"
_CONFIG, _WEIGHTS, _CARD = "config.json", "model.safetensors", "README.md"
_TRAIN_CONFIG, _RESULTS = "train_config.json", "results.json"
_LARGEST = 2**28
"""Largest size of a file in bytes."""


@dataclass(frozen=True)
class Tamiyo:
    """A trained controller with its model card, training configuration and results."""

    policy: Policy
    card: str = ""
    """The model card, in Markdown."""
    train_config: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Its scores, and the controllers that it was compared with."""

    @classmethod
    def from_pretrained(cls, name: str | Path = DEFAULT) -> Tamiyo:
        """Return the shipped controller of this name, or the one in a folder.

        Raises:
            UsageError: There is no such name or folder.
            CheckpointError: The folder is damaged, or its controller has other features or choices
                than this version of Esper.
        """
        folder = find_controller(name)
        config = _read_json(folder / _CONFIG)
        _refuse_other(folder, config)
        try:
            policy = new_policy(
                PolicyConfig.from_mapping(config["network"]),
                blueprint_names=tuple(config["blueprints"]),
                blueprint_kinds=tuple(config["kinds"]),
            )
            tensors = load(read_bytes(folder / _WEIGHTS, _LARGEST))
            limits = GrowthLimits(**config["limits"])
            policy = replace(policy, limits=limits, horizon=read_horizon(config))
            parts = ("network", "normalizer")
            policy.load_state_dict({part: _under(f"{part}.", tensors) for part in parts})
        except (*UNUSABLE, EsperError, SafetensorError) as error:
            reason = reason_of(error)
            raise CheckpointError(
                f"the controller in {folder} cannot be used: {reason}; get another copy of it"
            ) from error
        return cls(
            policy,
            read_bytes(folder / _CARD, _LARGEST).decode(errors="replace"),
            _read_json(folder / _TRAIN_CONFIG),
            _read_json(folder / _RESULTS),
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the controller to a folder, atomically replacing an earlier one."""
        here = {
            f"{part}.{name}": value.detach().cpu().contiguous()
            for part, values in self.policy.state_dict().items()
            for name, value in values.items()
        }
        write_folder(
            Path(folder),
            {
                _CONFIG: to_json(_describe(self.policy)),
                _WEIGHTS: save(here),
                _TRAIN_CONFIG: to_json(dict(self.train_config)),
                _RESULTS: to_json(dict(self.results)),
                _CARD: self.card.encode(),
            },
        )

    def controller(self, context: ControllerContext) -> TamiyoController:
        """Return the controller for a host with these slots and blueprints."""
        return TamiyoController(self.policy, context)


# ---- Networks unlike those of its training are left to a rule


FACTS = {
    "budget_used": "its number of parameters",
    "param_limit_left": "its limit on parameters",
    "flop_limit_left": "its limit on operations",
}
"""Features that show whether a network is unlike those of the training: its size and its limits."""

_IMAGES = TOPOLOGIES.index("cnn")

FARTHEST = 4.0
"""Standard deviations above the mean of its training beyond which a feature is unlike it.

At the first decision, members of the family that the shipped policy was trained on reach 2.7, other
networks that it grows well 2.6, and a ViT of 138,000 parameters, which it never grew, 13.8
(research/log.md).
"""


@register_controller("tamiyo")
class TamiyoController(LearnedController):
    """The controller that ships with Esper, or one in a folder: tamiyo, tamiyo:FOLDER.

    At the first decision it finds the networks that are unlike those of its training, and leaves
    them to the rule `trial`. In networks without slots for images it does not see the size of the
    training set, because it has learned how many images are enough, not how many texts
    (research/strangers).
    """

    def __init__(self, policy: Policy, context: ControllerContext, *, greedy: bool = True) -> None:
        super().__init__(policy, context, greedy=greedy)
        self._rule = TrialController(context)
        self._unlike: list[str] | None = None
        """By row: what is unlike the training, empty if nothing is; None before a decision."""

    @classmethod
    def build(cls, argument: str | None, context: ControllerContext) -> TamiyoController:
        """Return the shipped controller of this name, or the one in a folder."""
        return Tamiyo.from_pretrained(argument or DEFAULT).controller(context)

    def reset(self, rows: int, device: torch.device | str) -> None:
        """Start at the first step."""
        super().reset(rows, device)
        self._rule.reset(rows, device)
        self._unlike = None

    def act(self, signals: Signals, masks: Masks) -> dict[str, Tensor]:
        """Return the actions of the policy, or of the rule for networks unlike its training."""
        actions = super().act(signals, masks)
        if self._unlike is None:
            self._unlike = self._compare(signals)
            self._warn_once()
        if not any(self._unlike):
            return actions
        by_rule = self._rule.act(signals, masks)
        is_unlike = torch.tensor([bool(why) for why in self._unlike], device=masks.op.device)
        return {head: torch.where(is_unlike, by_rule[head], actions[head]) for head in actions}

    def decides(self, row: int = 0) -> bool:
        """Return whether the policy decides in a row, and not the rule."""
        return not (self._unlike and self._unlike[row])

    def reasons(self) -> Sequence[str]:
        """Return why each row waited or pruned at its last decision."""
        own = super().reasons()
        if not self._unlike or not any(self._unlike):
            return own
        pairs = zip(own, self._rule.reasons(), self._unlike, strict=True)
        return [theirs if why else mine for mine, theirs, why in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Return the memories of policy and rule, and which of them decides in every row."""
        return {
            **super().state_dict(),
            "unlike": self._unlike,
            "rule": self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._unlike = None if state["unlike"] is None else list(state["unlike"])
        self._rule.load_state_dict(state["rule"])

    def _own_signals(self, signals: Signals) -> Signals:
        """Return what the policy observes."""
        own = super()._own_signals(signals)
        is_image = own.slot_topology == _IMAGES
        has_others = ((own.slot_topology >= 0) & ~is_image).any(1) & ~is_image.any(1)
        return replace(own, train_samples=torch.where(has_others, 0, own.train_samples))

    def _compare(self, signals: Signals) -> list[str]:
        """Return, for every row, what is unlike the training of the policy."""
        assert self._last is not None
        normalizer = self.policy.normalizer
        labels = self.policy.layout.labels(self._context.slot_names, self.policy.blueprint_names)
        places = [labels.index(fact) for fact in FACTS if fact in labels]
        if len(places) < len(FACTS):
            return [""] * signals.rows  # the documents' layout has no such features
        away = ((self._last.raw - normalizer.mean) * normalizer.scale)[:, places]
        found, words = [], list(FACTS.values())
        for row, is_frozen in enumerate((signals.host_params == 0).tolist()):
            # Smaller networks and tighter limits are no problem: the policy takes what fits.
            index = int(away[row].argmax())
            distance = float(away[row, index])
            if is_frozen:
                found.append("0 parameters of its host train")
            elif distance > FARTHEST:
                found.append(f"{words[index]} is {distance:.1f} standard deviations above theirs")
            else:
                found.append("")
        return found

    def _warn_once(self) -> None:
        """Warn that a rule decides, for networks unlike the training."""
        unlike = [why for why in self._unlike or () if why]
        if unlike:
            rows = len(self._unlike or ())
            which = "this network is" if rows == 1 else f"{len(unlike)} of {rows} networks are"
            warn(
                f"{which} unlike those that tamiyo has learned on ({unlike[0]}), so a rule "
                "decides, as with controller='trial'"
            )


def shipped_names() -> tuple[str, ...]:
    """Return the names of the controllers that ship with the package."""
    return tuple(sorted(place.parent.name for place in _SHIPPED.glob(f"*/{_CONFIG}")))


def find_controller(name: str | Path = DEFAULT) -> Path:
    """Return the folder of a shipped controller, or the given folder of another one."""
    shipped = shipped_names()
    if str(name) in shipped:
        return _SHIPPED / str(name)
    folder = Path(name)
    if not (folder / _CONFIG).is_file():
        raise UsageError(
            f"there is no controller {str(name)!r}: Esper ships {', '.join(shipped)}, and a folder "
            f"must have a {_CONFIG}, as `save_pretrained` writes it"
        )
    return folder


def _describe(policy: Policy) -> dict[str, Any]:
    """Return the content of `config.json`."""
    config = policy.network.config
    features, choices = read_features(config), _choices()
    return {
        "model_type": MODEL_TYPE,
        "schema": SCHEMA,
        "esper": __version__,
        "network": config.to_mapping(),
        "blueprints": list(policy.blueprint_names),
        "kinds": list(policy.blueprint_kinds),
        "limits": asdict(policy.limits),
        "horizon": policy.horizon,
        "observation": {"hash": _hash(features), "features": features},
        "actions": {"hash": _hash(choices), "choices": choices},
    }


def _choices() -> list[str]:
    """Return all choices of all heads but slots and blueprints."""
    return [f"{head}={value}" for head, values in HEAD_VALUES.items() for value in values]


def _hash(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _refuse_other(folder: Path, config: dict[str, Any]) -> None:
    """Raise unless the controller in a folder fits this version of Esper."""
    if config.get("model_type") != MODEL_TYPE or config.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{folder} has a {config.get('model_type')!r} of schema {config.get('schema')!r}; this "
            f"Esper reads {MODEL_TYPE!r} of schema {SCHEMA}"
        )
    try:
        network = PolicyConfig.from_mapping(config["network"])
        parts = [
            ("reads", config["observation"]["features"], read_features(network)),
            ("chooses", config["actions"]["choices"], _choices()),
        ]
        hashes = [config["observation"]["hash"], config["actions"]["hash"]]
        for _, theirs, _ in parts:
            if not isinstance(theirs, list):
                raise TypeError(f"{type(theirs).__name__} where a list should be")
    except UNUSABLE as error:
        raise CheckpointError(f"{folder / _CONFIG} is not complete: {error}") from error
    for (verb, theirs, ours), stated in zip(parts, hashes, strict=True):
        if stated == _hash(ours):
            continue
        difference = describe_difference(theirs, ours) or "entries that do not match their hash"
        raise CheckpointError(
            f"the controller in {folder} {verb} {difference}; use it with Esper "
            f"{config.get('esper')}, or another controller"
        )


def _under(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = from_json(read_bytes(path, _LARGEST))
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}; get another copy of it") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a mapping; get another copy of it")
    return found
