"""A callback for the `Trainer` of Hugging Face that deepens a model while it is trained.

    Trainer(model, args, callbacks=[DeepenCallback()], ...).train()

The model is the one finally wanted; a quarter of its blocks are awake at first, and the rest wake
as copies. Checkpoints of the trainer hold the whole model and how many blocks are awake, so
`train(resume_from_checkpoint=...)` goes on as if it had not stopped.
"""

from __future__ import annotations

from typing import Any

from esper.growth.depth.deepen import Deepen
from esper.leyline.errors import UsageError, needing

with needing("esper.integrations.hugging_face", "transformers"):
    import accelerate  # noqa: F401
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import ExportableState
    from transformers.training_args import ParallelMode, TrainingArguments


class DeepenCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Deepens the model that a `Trainer` trains.

    Args:
        options: of `esper.Deepen`: `start`, `at`, `stacks`, `order`, `controller`, `ema`;
            `total_steps` and `batches_per_step` are those of the trainer. Controllers that judge by
            the loss see what the trainer logs, so `logging_steps` must be below 1 % of the run.
    """

    def __init__(self, **options: Any) -> None:
        """Choose how to deepen; blocks sleep from the first batch on."""
        self._options = options
        self._depth: Deepen | None = None
        self._loss: float | None = None

    @property
    def depth(self) -> Deepen:
        """The `Deepen` at work; there is one from the start of `train` on."""
        if self._depth is None:
            raise UsageError("there is a Deepen once trainer.train() has begun")
        return self._depth

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes into its checkpoints."""
        saved = None if self._depth is None else self._depth.state_dict()
        return {"args": {}, "attributes": {"saved": saved, "loss": self._loss}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Put blocks to sleep; the trainer has loaded model and optimizer by now."""
        _check(args, given["model"])
        options = {
            "total_steps": state.max_steps,
            "batches_per_step": args.gradient_accumulation_steps,
            **self._options,
        }
        self._depth, self._loss = Deepen(given["model"], given["optimizer"], **options), None
        stored = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and stored is None:
            raise UsageError(
                "this checkpoint was written without DeepenCallback, so all of its blocks are "
                "awake; go on without the callback"
            )
        if state.global_step:
            self._depth.load_state_dict(stored["attributes"]["saved"])
            self._loss = stored["attributes"]["loss"]

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Take down the training loss."""
        self._loss = (given.get("logs") or {}).get("loss", self._loss)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Count the step and wake blocks when it is time; the trainer saves after this."""
        self.depth.step(self._loss)


def _check(args: TrainingArguments, model: Any) -> None:
    """Refuse settings of a trainer under which blocks cannot sleep."""
    if args.restore_callback_states_from_checkpoint:
        raise UsageError(
            "DeepenCallback restores itself; leave restore_callback_states_from_checkpoint=False"
        )
    if args.load_best_model_at_end:
        raise UsageError(
            "load_best_model_at_end=True would load blocks that were asleep into a model in which "
            "they are awake; leave it False and load a checkpoint of your choice"
        )
    if args.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
        raise UsageError(
            "blocks cannot sleep in nn.DataParallel, which the Trainer uses for several GPUs of a "
            "process; start one process for each GPU with torchrun"
        )
    finds_unused = args.ddp_find_unused_parameters
    if finds_unused is None:
        # What the Trainer does by itself.
        finds_unused = not (
            getattr(model, "is_gradient_checkpointing", False) or args.gradient_checkpointing
        )
    is_ddp = args.parallel_mode == ParallelMode.DISTRIBUTED and not args.fsdp
    if is_ddp and not finds_unused:
        raise UsageError(
            "DistributedDataParallel would wait for sleeping blocks; set "
            "TrainingArguments(ddp_find_unused_parameters=True)"
        )
