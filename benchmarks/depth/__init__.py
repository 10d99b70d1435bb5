"""Compare networks that grow in depth with static ones: loss against training compute.

    python -m benchmarks depth run small --out small.jsonl --workers 2   # a CPU is enough
    python -m benchmarks depth corpus --out DATA     # the texts of the larger cells
    python -m benchmarks depth images --out DATA     # CIFAR-10 at 16x16
    python -m benchmarks depth run python-short prose --data DATA --out results.jsonl --seconds 540
    python -m benchmarks depth summary results.jsonl small.jsonl

`run` continues where it stopped: runs in the file are not repeated. At the time limit, the run in
progress is dropped. Cells: python-short, python-long, prose, ladder, vit, cnn (each wants a GPU)
and small. Raw results are kept in research/depth.
"""

from benchmarks.depth.command import main

__all__ = ["main"]
