"""Constants that CUDA kernels are compiled for in tests, and files with every variant of some."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from isobatch_kernels.cuda.source import KernelSource

_MODEL: Final = {"HEADS": 28, "KV_HEADS": 4, "D": 128}
_ODD_MODEL: Final = {"HEADS": 4, "KV_HEADS": 2, "D": 24}
_B64: Final = {"SB": 4, "B": 64, "ST": 0}


def _rows(
    nt: int, mt: int, held: int, slices: int, teams: int, cluster: int = 1, *, logit: int = 0
) -> dict[str, int]:
    return {
        "NT": nt,
        "MT": mt,
        "HELD": held,
        "SLICES": slices,
        "CLUSTER": cluster,
        "TEAMS": teams,
        "SETS": 1 if cluster == 8 else 2,
        "DEEP": 2,
        "STAGES": 3,
        "RESIDENT": 1,
        "LOGIT": logit,
    }


# Several sets where they change a kernel's paths.
VARIANTS: Final[dict[str, tuple[dict[str, int], ...]]] = {
    "linear_rows": (
        {**_B64, **_rows(1, 1, 2, 8, 1)},
        {**_B64, **_rows(2, 1, 8, 8, 2)},
        {**_B64, **_rows(2, 2, 8, 8, 2)},
        {**_B64, **_rows(2, 1, 4, 1, 7)},
        {**_B64, **_rows(2, 4, 8, 2, 4)},
        {**_B64, **_rows(1, 2, 8, 4, 4, 2)},
        {**_B64, **_rows(2, 2, 8, 2, 7, 4)},
        {**_B64, **_rows(1, 8, 8, 1, 14, 8)},
        {**_B64, **_rows(1, 1, 4, 1, 14, 8)},
        {**_B64, **_rows(1, 8, 8, 1, 8)},
        {"SB": 4, "B": 32, "ST": 0, **_rows(1, 1, 4, 8, 1)},
        {"SB": 4, "B": 16, "ST": 1, **_rows(2, 1, 4, 4, 2)},
        {"SB": 8, "B": 32, "ST": 2, **_rows(2, 1, 4, 8, 1, logit=1)},
        {"SB": 8, "B": 64, "ST": 2, **_rows(2, 2, 8, 1, 8, logit=1)},
    ),
    "linear_tiles": (
        {**_B64, "WT": 1, "RP": 1, "STAGES": 4, "LOGIT": 0},
        {**_B64, "WT": 2, "RP": 2, "STAGES": 4, "LOGIT": 0},
        {"SB": 4, "B": 32, "ST": 0, "WT": 2, "RP": 1, "STAGES": 4, "LOGIT": 0},
        {"SB": 8, "B": 32, "ST": 2, "WT": 2, "RP": 2, "STAGES": 4, "LOGIT": 1},
    ),
    "pack_quantized": ({**_B64, "BITS": 4}, {"SB": 8, "B": 32, "ST": 2, "BITS": 5}),
    "quantize": ({"A": 64, "HALVES": 0}, {"A": 32, "HALVES": 1}),
    "gate_quantize": ({"A": 64, "HALVES": 0},),
    "norm_quantize": (
        {"A": 64, "HALVES": 0, "WARPS": 32},
        {"A": 32, "HALVES": 1, "WARPS": 8},
    ),
    "embed": (_B64, {"SB": 8, "B": 32, "ST": 2}),
    "embed_dense": ({"BFLOAT": 0}, {"BFLOAT": 1}),
    "rope_write_kv": ({**_MODEL, "INTERLEAVED": 0}, {**_MODEL, "INTERLEAVED": 1}),
    "attention_chunks": (
        *({**_MODEL, "SHARE": share} for share in (1, 4, 7)),
        {**_ODD_MODEL, "SHARE": 2},
    ),
    "attention_merge_quantize": ({"HEADS": 28, "D": 128, "A": 64, "HALVES": 0},),
    "attention_prefill": (_MODEL, _ODD_MODEL),
    "prepare_dense": ({"BFLOAT": 1}, {"BFLOAT": 0}),
    "dense": ({"BFLOAT": 0, "LOGIT": 0},),
}


def translation_unit(kernels: Sequence[KernelSource]) -> str:
    """Every variant of the kernels of one file, each in a namespace; without the device's text."""
    parts = [kernels[0].helpers]
    for kernel in kernels:
        for i, constants in enumerate(VARIANTS.get(kernel.name, ({},))):
            own = kernel.body(constants).removeprefix(kernel.helpers)
            name = f"{kernel.name}_{i}"
            own = re.sub(rf"\b{kernel.name}\(", f"{name}(", own, count=1)
            parts.append(f"namespace in_{name} {{\n{own}}}\n")
    return "".join(parts)
