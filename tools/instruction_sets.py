"""The instruction sets PyTorch computes with on x86, and how a process is limited to one.

PyTorch, oneDNN and MKL choose the widest vectors a processor has. Sums over vectors of another
width differ in their last bits, and training makes such differences grow. Limiting all three shows
on one machine what a program does on others.
"""

from __future__ import annotations

INSTRUCTION_SETS: dict[str, dict[str, str]] = {
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
    },
    # Not up to AMX: some processors advertise it and trap on its first instruction.
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_CBWR": "AVX512",
    },
}
"""Environment of a process that uses each of them, narrowest vectors first."""


def available(widest: str | None = None) -> tuple[str, ...]:
    """Return the instruction sets of a processor by its widest, by default those of this one.

    PyTorch names another where the processor is not x86; that one has `default` alone.
    """
    if widest is None:
        import torch

        widest = torch.backends.cpu.get_cpu_capability().lower()
    names = tuple(INSTRUCTION_SETS)
    return names[: names.index(widest) + 1] if widest in names else names[:1]
