"""The tasks on text that ship with Esper: next-byte prediction with small transformers.

Some read files. Others need none: the sources of Python's own library, and texts that are computed.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from esper.kasmina.hosts import TransformerConfig
from esper.lab.tasks.data import synthetic, text
from esper.lab.tasks.data.source import Array, Source
from esper.lab.tasks.member import SCHEDULE, WARM_UP
from esper.lab.tasks.task import DataPath, Task, TaskConfig, register_task
from esper.leyline.errors import UsageError

STORY_BYTES = 32 * 2**20
"""Bytes read from each story file; the full set has gigabytes, more than a run uses."""


class _Stories(Task):
    """Next-byte prediction on plain text."""

    def find(self, data_path: DataPath | None = None) -> str:
        """Return where the text lies."""
        return str(text.find_stories(data_path)[0].parent)

    def read(self, data_path: DataPath | None) -> Source:
        """Return TinyStories, or any text the user gives, as byte tokens."""
        (context,) = self.config.input_shape
        files = text.find_stories(data_path)
        return text.read_text(files, context, limit_bytes=STORY_BYTES, name="stories")


def _stories_config(host: TransformerConfig, **settings: Any) -> TaskConfig:
    return TaskConfig(
        host="transformer",
        host_options=host,
        objective="language",
        input_shape=(host.context,),
        num_classes=text.VOCAB,
        samples_per_step=1024,
        # Small batches and no weight decay: with these SGD, slow on transformers, was fastest.
        batch_size=16,
        learning_rate=0.1,
        weight_decay=0.0,
        baseline_loss=math.log(text.VOCAB),
        **settings,
    )


@register_task("stories")
class Stories(_Stories):
    """Byte-level TinyStories, or any UTF-8 text, with a small transformer."""

    defaults = _stories_config(
        TransformerConfig(vocab=text.VOCAB, dim=64, heads=4, layers=3, context=64),
        target_loss=1.2,
    )


@register_task("tinystories")
class TinyStories(_Stories):
    """The same text with a larger transformer; bytes stand in for the documents' GPT-2 tokens."""

    defaults = _stories_config(
        TransformerConfig(vocab=text.VOCAB, dim=192, heads=6, layers=6, context=256),
        target_loss=1.0,
        param_budget=10_000_000,
    )


# The network and the rates of the cell `small` of research/depth, which a CPU trains in a minute;
# AdamW and the final decay were tuned there for the static network.
_EMBEDDED_TEXT = _stories_config(
    TransformerConfig(vocab=text.VOCAB, dim=32, heads=2, layers=4, context=64, segments=4),
    validation_samples=512,
    horizon=40,
    target_loss=1.2,
).replace(
    optimizer="adamw",
    learning_rate=0.004,
    weight_decay=0.1,
    decay=0.25,
    schedule=SCHEDULE,
    warmup=WARM_UP,
)


class _EmbeddedText(Task):
    """Next-byte prediction on a text that needs no files, or on any text the user gives.

    With 64 classes instead of 256 the text that needs no files is folded (`text.fold`).
    """

    def read(self, data_path: DataPath | None) -> Source:
        """Return the embedded text, or the user's own."""
        (context,) = self.config.input_shape
        if data_path is None:
            embedded = self.read_embedded(context)
            if self.config.num_classes != text.FOLDED:
                return embedded
            return dataclasses.replace(embedded, x=text.fold(embedded.x), num_classes=text.FOLDED)
        if self.config.level is not None:
            raise UsageError(
                f"level={self.config.level} is for the computed text of task {self.name!r}, not "
                f"for {data_path}; leave out the level or the data"
            )
        return text.read_text(text.find_text(data_path), context, limit_bytes=STORY_BYTES)

    @property
    def source_key(self) -> Hashable:
        """Key of the source; a text with fewer tokens is folded."""
        return super().source_key, self.config.num_classes

    @abstractmethod
    def read_embedded(self, context: int) -> Source:
        """Return the text as sequences of context + 1 bytes."""


@register_task("sources")
class Sources(_EmbeddedText):
    """Python's own sources byte by byte, with a transformer of four blocks; needs no files."""

    defaults = _EMBEDDED_TEXT

    def read_embedded(self, context: int) -> Source:
        """Return the standard library of this Python."""
        return text.read_sources(context)


class _ComputedText(_EmbeddedText):
    """A text that is computed, at one of several levels."""

    make: ClassVar[Callable[[int], Array]]
    """Returns the text of a level."""

    usual: ClassVar[int]
    """The level where none is given."""

    def read_embedded(self, context: int) -> Source:
        """Return the text of the level."""
        made = type(self).make(self.config.level or self.usual)
        return synthetic.read_computed(self.name, made, context)

    @property
    def source_key(self) -> Hashable:
        """Key of the source; a text differs by level."""
        return super().source_key, self.config.level or self.usual


@register_task("sums")
class Sums(_ComputedText):
    """Lines of sums and products of numbers of up to so many digits; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_sums), (1, 6), 3
    defaults = _EMBEDDED_TEXT


@register_task("links")
class Links(_ComputedText):
    """So many variables that name each other or a digit, and then their values; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_links), (2, 8), 4
    defaults = _EMBEDDED_TEXT.replace(target_loss=1.0)


@register_task("facts")
class Facts(_ComputedText):
    """Lines of so many keys and values, to be known by heart; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_facts), (1, 100_000), 400
    # The keys alone have log2(level) / 10 bits a byte.
    defaults = _EMBEDDED_TEXT.replace(target_loss=0.9)


@register_task("mirrors")
class Mirrors(_ComputedText):
    """Words of so many random letters, each followed by its mirror image; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_mirrors), (1, 24), 6
    defaults = _EMBEDDED_TEXT.replace(target_loss=1.6)


@register_task("copies")
class Copies(_ComputedText):
    """Words of so many random letters, each followed by itself; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_copies), (1, 24), 5
    defaults = _EMBEDDED_TEXT.replace(target_loss=0.9)


@register_task("sorting")
class Sorting(_ComputedText):
    """Words of so many random letters, each followed by its letters in order; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_sorting), (1, 24), 5
    defaults = _EMBEDDED_TEXT.replace(target_loss=1.6)


@register_task("repeats")
class Repeats(_ComputedText):
    """Lines of eight words, each one of so many random words; needs no files."""

    make, levels, usual = staticmethod(synthetic.make_repeats), (1, 8), 3
    defaults = _EMBEDDED_TEXT.replace(target_loss=1.6)


@register_task("chain")
class Chain(_EmbeddedText):
    """A Markov chain of order two, for which one block is enough; needs no files."""

    # Two bytes say all that can be known about the next one: 2.5 bits, or 1.75 nats, remain.
    defaults = _EMBEDDED_TEXT.replace(target_loss=1.9)

    def read_embedded(self, context: int) -> Source:
        """Return the chain."""
        return synthetic.read_computed(self.name, synthetic.make_chain(), context)
