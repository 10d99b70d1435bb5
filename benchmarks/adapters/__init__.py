"""What adapters placed by gradients are worth: against PEFT's LoRA of uniform rank, equal in size.

    python -m benchmarks adapters run gpt2 cnn --data DATA --out results.jsonl
    python -m benchmarks adapters summary results.jsonl

`run` goes on where it was stopped: what is in the file is not trained again. It first tunes the
rate of every arm on seeds of its own, widens the grid until the best rate is not at its edge, and
then trains other seeds at that rate: four, and eight of the vit. Cases: gpt2 (needs transformers),
vit, cnn, arm, mobilenet. The arm `peft` needs PEFT. Raw results are kept in research/adapters.
"""

from benchmarks.adapters.command import main

__all__ = ["main"]
