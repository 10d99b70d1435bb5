"""Compare `esper.Adapt` with PEFT's LoRA of uniform rank, at equal trainable parameters.

    python -m benchmarks adapters run gpt2 cnn --data DATA --out results.jsonl
    python -m benchmarks adapters summary results.jsonl

`run` continues where it stopped: runs in the file are not repeated. It first tunes the rate of
every arm on separate seeds and widens the grid until the best rate is not at its edge. Then it
trains other seeds at that rate: four, and eight for the vit. Cases: gpt2 (needs transformers), vit,
cnn, arm, mobilenet. The arm `peft` needs PEFT. Raw results are kept in research/adapters.
"""

from benchmarks.adapters.command import main

__all__ = ["main"]
