"""Population: trains, validates, ablates and evolves many hosts at once.

`population` is what callers see. Its rows are task groups (`task_group`), rows of one architecture
on one engine that live by the one step of `esper.kasmina.row_group`; `strategy` picks and builds
the engine, and `engine` says what one is:

* `sequential`: one garden after another. Slow, plain, and the semantics.
* `workers/`: the same in CPU processes (`client` here, `process` there, `pool` between
  them; `handle` replaces a process that dies, by its `journal`).
* `stacked`: all rows as one batch of networks under `vmap`. `parameter_stack` and `seed_stacks`
  hold the weights, `slot_forward` runs seeds at a slot, `train_step` is one optimizer step,
  `validation` measures, `batches` draws samples; `vmap_rules` and `kernels/` make it fast, `device`
  captures it in CUDA graphs.
"""
