"""What growing depth by copies saves: loss against training compute, grown and static networks.

    python -m benchmarks depth run small --out small.jsonl --workers 2   # a CPU is enough
    python -m benchmarks depth corpus --out DATA     # the texts of the larger cells
    python -m benchmarks depth images --out DATA     # CIFAR-10 at 16x16
    python -m benchmarks depth run python-short prose --data DATA --out results.jsonl --seconds 540
    python -m benchmarks depth summary results.jsonl small.jsonl

`run` goes on where it was stopped: what is in the file is not trained again. Where time is up, the
run in progress is dropped. Cells: python-short, python-long, prose, ladder, vit, cnn (each wants a
GPU) and small. Raw results are kept in research/depth.
"""

from benchmarks.depth.command import main

__all__ = ["main"]
