"""Kernels for stacked rows on a CUDA device: one launch where PyTorch needs several passes.

Every file holds operations of one kind: Triton kernels and the functions that run them, with
autograd. Rows are dimension 0 of every tensor, activations are [R, B, C, ...] and contiguous. The
plain PyTorch form next to each caller is the reference; these give the same up to rounding. Triton
comes with PyTorch's CUDA builds, so nothing here is imported on a CPU.
"""
