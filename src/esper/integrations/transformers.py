"""A callback for the `Trainer` of Hugging Face that lets a model grow while it is trained.

    garden = esper.Garden(model, slots, example)
    growing = GrowingCallback(garden, horizon=20)
    Trainer(
        growing.model,
        TrainingArguments(..., eval_strategy="steps", eval_steps=50),
        callbacks=[growing],
        optimizers=(growing.optimizer(torch.optim.AdamW, lr=1e-3), None),
        ...
    ).train()

Growth decides whenever the trainer has evaluated. The checkpoints of the trainer hold everything:
the garden grows back before its weights are loaded, the optimizer finds its parameters by name, and
what the gardener remembers travels with the optimizer. So `train(resume_from_checkpoint=...)` goes
on as if it had not stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.batches import count_samples
from esper.growth.criterion import Loss
from esper.growth.gardener import DEFAULT_CONTROLLER, Gardener, GardenerConfig
from esper.growth.own_loss import own_loss_of
from esper.integrations.rounds import Rounds
from esper.kasmina.evaluation import Evaluate, Evaluator
from esper.kasmina.garden import Garden
from esper.leyline.controller import Controller
from esper.leyline.errors import UsageError, needing, warn
from esper.leyline.records import EpochRecord
from esper.leyline.storage import separate

with needing("esper.integrations.transformers", "transformers"):
    import accelerate  # noqa: F401
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class GrowingModel(nn.Module):
    """A garden as the trainer wants a model: it takes what the host takes, and saves as one.

    The trainer asks a model's class which arguments it takes, so every host has a class of its own:
    `growing_model` makes it. What this module does not have itself is looked up in the host.
    """

    def __init__(self, garden: Garden) -> None:
        """Hold the garden; nothing is copied."""
        super().__init__()
        self.garden = garden
        self.on_loss: Callable[[Any], None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the garden."""
        outputs = self.garden(*args, **kwargs)
        if self.training and self.on_loss is not None:
            self.on_loss(own_loss_of(outputs))
        return outputs

    @property
    def config(self) -> Any:
        """The configuration of the host."""
        return getattr(self.garden.model, "config", None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return weights and lifecycle, with tied weights apart, as safetensors needs them."""
        state = super().state_dict(*args, **kwargs)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        state.update(separate(tensors))
        return state

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "garden":
                raise
            return getattr(self.garden.model, name)


def growing_model(garden: Garden) -> GrowingModel:
    """Return a garden as a model that the trainer takes for one of the host's kind."""
    host = type(garden.model)

    def forward(self: GrowingModel, *args: Any, **kwargs: Any) -> Any:
        return GrowingModel.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(host.forward)  # type: ignore[attr-defined]
    kind: type[GrowingModel] = type(
        f"Growing{host.__name__}", (GrowingModel,), {"forward": forward}
    )
    return kind(garden)


class GrowingCallback(TrainerCallback):  # type: ignore[misc]
    """Grows a garden in a `Trainer`; give that its `model` and its `optimizer`.

    Args:
        garden: around the model to be trained.
        horizon: evaluations of the whole run.
        controller: 'tamiyo', the learned one that comes along, 'heuristic', 'wait',
            'schedule:FILE', or an object.
        loss: how an evaluation sample is judged, as `esper.grow` takes it; by default the model's
            own loss.
        evaluate: measures the garden in place of the trainer's evaluation batches: a function from
            the model to (loss[M], correct[M] or None), samples in a fixed order.
        max_growth: most parameters and operations of the grown network, as a multiple of the
            model's: 2.0 or "2x" lets it double. By default what the controller learned under:
            'tamiyo' grows a network to twice its size at most, rules know no limit.
        max_seeds: most seeds alive or fossilized at once, 0 without a limit.
        max_parameters: most trainable parameters, in place of what `max_growth` allows.
        max_added_flops: most operations per sample that seeds may add, likewise.
        seed: seed of controllers that draw.
        config: further settings.
    """

    def __init__(
        self,
        garden: Garden,
        horizon: int,
        controller: str | Controller = DEFAULT_CONTROLLER,
        *,
        loss: Loss | None = None,
        evaluate: Evaluate | Evaluator | None = None,
        max_growth: float | str | None = None,
        max_seeds: int | None = None,
        max_parameters: int | None = None,
        max_added_flops: int | None = None,
        seed: int = 0,
        config: GardenerConfig | None = None,
    ) -> None:
        """Bring garden and controller together; nothing is measured yet."""
        self.gardener = Gardener(
            garden,
            controller,
            horizon,
            max_growth=max_growth,
            max_seeds=max_seeds,
            max_parameters=max_parameters,
            max_added_flops=max_added_flops,
            seed=seed,
            # The trainer gives every process a part of the evaluation samples.
            config=(config or GardenerConfig()).replace(val_is_sharded=True),
        )
        self.model = growing_model(garden)
        """What to give to the trainer as its model."""
        self._rounds = Rounds(self.gardener, loss, evaluate)
        self._measures_itself = evaluate is not None
        self._is_training = False
        self._step = -1

    @property
    def history(self) -> list[EpochRecord]:
        """What happened, one record for each evaluation."""
        return self.gardener.history

    def optimizer(
        self,
        factory: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> Optimizer:
        """Return `factory(params, **options)` for the trainer, kept in step with growth."""
        made = self.gardener.optimizer(factory, params, **options)
        self._rounds.carry(made)
        return made

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Refuse a trainer in which nothing could grow."""
        if given["model"] is not self.model:
            raise UsageError("the trainer trains another model; give it growing.model")
        carried = self.gardener.carried
        if carried is None or _inner(given["optimizer"]) is not carried.optimizer:
            raise UsageError(
                "the trainer has an optimizer that new seeds cannot join; give it one: "
                "optimizers=(growing.optimizer(torch.optim.AdamW, lr=...), None)"
            )
        expected = _evaluations(args, state)
        if not expected:
            raise UsageError(
                "growth decides whenever the trainer evaluates; set eval_strategy='epoch', or "
                "'steps' with eval_steps=N"
            )
        if expected < self.gardener.horizon:
            warn(
                f"the trainer will evaluate {expected} times, but the horizon of growth is "
                f"{self.gardener.horizon}; seeds may not be ready at the end"
            )
        each = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.gardener.tell(
            train_samples=count_samples(given["train_dataloader"]),
            samples_per_epoch=state.max_steps * each // expected,
        )
        self._is_training = True
        self.model.on_loss = self._rounds.add_loss

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Measure, decide and act; the trainer saves its checkpoint after this."""
        # Of several evaluation sets the first one counts; evaluations by hand do not.
        if not self._is_training or state.global_step == self._step:
            return
        self._step = state.global_step
        self.model.train()
        self._rounds.end(None if self._measures_itself else given["eval_dataloader"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Grow no more."""
        self._is_training = False
        self.model.on_loss = None


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate may have wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _evaluations(args: TrainingArguments, state: TrainerState) -> int:
    """Return how often the trainer will evaluate."""
    # Its names are both text and members of an enumeration.
    if args.eval_strategy == "epoch":
        return int(state.num_train_epochs)
    if args.eval_strategy == "steps":
        return int(state.max_steps / state.eval_steps)
    return 0
