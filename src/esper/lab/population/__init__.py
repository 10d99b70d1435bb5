"""Population: trains, validates, ablates and evolves many hosts at once.

Callers use `population`. Its rows form task groups (`task_group`): rows of one architecture on one
engine, stepped by `esper.kasmina.row_group`. `engine` defines the interface of engines, and
`strategy` chooses and builds one:

* `sequential`: one garden after another. It is slow, and the reference for all other strategies.
* `workers`: the same in CPU processes. `worker_pool` has the processes, and `worker_handle`
  replaces one that dies and replays its requests.
* `stacked`: all rows as one batch of networks under `vmap`. `parameter_stack` and `seed_stacks`
  hold the weights, `slot_forward` runs seeds at a slot, `train_step` is one optimizer step,
  `validation` measures, `batches` draws samples; `vmap_rules` and `kernels/` make it fast, `engine`
  captures it in CUDA graphs.
"""
