"""Recalibration of running statistics (BatchNorm) for the present weights and amplitudes.

A BatchNorm layer keeps a moving average of its training batches. When a seed comes, goes or changes
its amplitude, that average belongs to an earlier network, and scores are wrong by whole points.
Here the statistics are computed again: the mean over training batches of a bounded number of
samples, weighted by batch size, with dropout off. Training itself does not use them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.kasmina.evaluation import Evaluator, Results, joined, moving_norms, refuse_change
from esper.kasmina.garden import Garden
from esper.kasmina.slots.probe import axis_size, call_arguments, evaluating, tensors_in
from esper.utils.randomness import drawing

DEFAULT_SAMPLES = 2048
"""Most training samples that statistics are taken from, unless a setting says otherwise."""


class SpreadSample:
    """Keeps batches evenly spread over a stream of unknown length, up to `most` samples.

    Args:
        most: how many samples to keep. About half as many are kept at least, where there are
            enough; a single batch is kept even if it has more. 0 keeps nothing.
    """

    def __init__(self, most: int) -> None:
        """Keep nothing yet."""
        self.batches: list[Any] = []
        self.most = most
        self._stride = 1
        self._count = 0

    def add(self, batch: Any) -> None:
        """Offer the next batch of the stream."""
        if self.most and self._count % self._stride == 0:
            self.batches.append(batch)
            while len(self.batches) > 1 and sum(map(count_samples_in, self.batches)) > self.most:
                self.batches = self.batches[::2]
                self._stride *= 2
        self._count += 1


def first_samples(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Yield batches as long as another one like the last stays within `most` samples.

    The first is yielded in any case, and none is read that is not yielded.
    """
    seen = 0
    for batch in batches:
        yield batch
        size = count_samples_in(batch)
        seen += size
        if seen + size > most:
            return


def count_samples_in(batch: Any) -> int:
    """Return the number of samples of a batch of inputs: the first size of its first tensor."""
    return max(1, axis_size(batch, 0))


@torch.no_grad()
def recalibrate(model: nn.Module, inputs: Iterable[Any], norms: Sequence[_NormBase]) -> int:
    """Recompute the statistics of these layers; return the number of samples used.

    A layer that no batch reaches keeps its statistics.

    Args:
        model: the network.
        inputs: batches of its inputs: a tensor, a tuple of arguments or a dict of them each.
        norms: layers of the model, as `moving_norms` returns them.
    """
    if not norms:
        return 0
    count = 0
    with _averaging(model, norms), _eagerly(model):
        for batch in inputs:
            device = next((tensor.device for tensor in tensors_in(batch)), torch.device("cpu"))
            args, kwargs = call_arguments(batch)
            with drawing(device, "recalibrate"):
                model(*args, **kwargs)
            count += count_samples_in(batch)
    return count


def read_statistics(norms: Sequence[_NormBase]) -> list[Tensor]:
    """Return copies of the running means and variances of layers, layer by layer."""
    return [tensor.clone() for tensor in _statistics(norms)]


def write_statistics(norms: Sequence[_NormBase], values: Sequence[Tensor]) -> None:
    """Give layers the means and variances that `read_statistics` returned."""
    for own, value in zip(_statistics(norms), values, strict=True):
        own.copy_(value)


class RecalibratedEvaluator:
    """Measures every configuration of seeds with running statistics of its own.

    The first configuration uses the garden's statistics. For every other they are recomputed on
    training batches and restored afterwards. Configurations then cannot share passes.

    Args:
        evaluator: measures one configuration.
        inputs: training batches, of inputs alone.
        norms: layers of the garden with running statistics.
    """

    def __init__(
        self, evaluator: Evaluator, inputs: Sequence[Any], norms: Sequence[_NormBase]
    ) -> None:
        """Bind the parts; nothing is measured yet."""
        self._evaluator = evaluator
        self._inputs = inputs
        self._norms = norms

    def measure(self, garden: Garden, configurations: Tensor) -> Results:
        """Return loss [K, M] and correctness [K, M] (or None) for configurations [K, S]."""
        kept = read_statistics(self._norms)
        found: list[Results] = []
        try:
            for number, configuration in enumerate(configurations.split(1)):
                if number:
                    with garden.seedbed.configured(configuration, None):
                        recalibrate(garden, self._inputs, self._norms)
                found.append(self._evaluator.measure(garden, configuration))
                refuse_change(found[0], found[-1])
        finally:
            write_statistics(self._norms, kept)
        return joined(found, 0)


def fitting_evaluator(evaluator: Evaluator, garden: Garden, inputs: Sequence[Any]) -> Evaluator:
    """Return an evaluator whose ablations have statistics that fit, where the garden has any."""
    norms = moving_norms(garden) if inputs else []
    return RecalibratedEvaluator(evaluator, inputs, norms) if norms else evaluator


@contextmanager
def _averaging(model: nn.Module, norms: Sequence[_NormBase]) -> Iterator[None]:
    """Within the block the model is in eval mode, except these layers, which average."""
    kept = [(norm, norm.momentum, _count(norm)) for norm in norms]
    seen: dict[_NormBase, int] = dict.fromkeys(norms, 0)

    def weigh(norm: nn.Module, args: Any) -> None:
        assert isinstance(norm, _NormBase)
        if not seen[norm]:
            # Also what is not finite: it would stay so in any average.
            norm.reset_running_stats()
        values = args[0].numel()
        seen[norm] += values
        norm.momentum = values / seen[norm]

    handles = [norm.register_forward_pre_hook(weigh) for norm in norms]
    try:
        with evaluating(model):
            for norm in norms:
                norm.training = True
            yield
    finally:
        for handle in handles:
            handle.remove()
        for norm, momentum, count in kept:
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a compiled model runs as it is written.

    A momentum that changes with every batch would compile it anew each time.
    """
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
    if not compiled:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _count(norm: _NormBase) -> Tensor | None:
    tracked = norm.num_batches_tracked
    return None if tracked is None else tracked.clone()


def _statistics(norms: Sequence[_NormBase]) -> list[Tensor]:
    pairs = [(norm.running_mean, norm.running_var) for norm in norms]
    return [tensor for tensor in itertools.chain(*pairs) if tensor is not None]
