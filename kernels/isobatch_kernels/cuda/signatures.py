"""Types and template parameters of the kernels: what a compiler needs to check them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from isobatch_kernels.cuda.source import KernelSource

# Element types of buffers; float where a name is not listed.
_TYPES: Final = {
    "q": "__half",
    "bits": "__half",
    "cache": "__half",
    "flags": "uint32_t",
    **dict.fromkeys(("op", "window", "width", "stride", "layer", "count"), "float"),
    **dict.fromkeys(
        (
            *(
                "rows",
                "ids",
                "positions",
                "block",
                "blocks",
                "tokens",
                "tables",
                "begins",
                "counts",
            ),
            *("edit_starts", "edit_ids", "edited", "done", "answers", "chunk_ids", "results"),
        ),
        "int32_t",
    ),
}
_MODEL: Final = {"HEADS": 28, "KV_HEADS": 4, "D": 128}
_ROWS: Final = {"SB": 4, "B": 64, "ST": 0}
# Template parameters that each kernel is checked with; several sets where they change its paths.
VARIANTS: Final[dict[str, tuple[dict[str, int], ...]]] = {
    "linear_rows": (
        *(
            {**_ROWS, "NT": nt, "MT": mt, "HELD": 8 * mt, "STAGES": 4, "LOGIT": 0}
            for nt, mt in ((1, 1), (2, 1), (4, 1), (1, 2), (4, 2))
        ),
        {"SB": 4, "B": 32, "ST": 0, "NT": 1, "MT": 1, "HELD": 4, "STAGES": 4, "LOGIT": 0},
        {"SB": 4, "B": 16, "ST": 1, "NT": 2, "MT": 1, "HELD": 4, "STAGES": 4, "LOGIT": 0},
        {"SB": 8, "B": 32, "ST": 2, "NT": 2, "MT": 1, "HELD": 4, "STAGES": 4, "LOGIT": 1},
        {"SB": 8, "B": 64, "ST": 2, "NT": 2, "MT": 2, "HELD": 4, "STAGES": 4, "LOGIT": 1},
    ),
    "linear_tiles": (
        {**_ROWS, "RP": 4, "STAGES": 4, "LOGIT": 0},
        {**_ROWS, "RP": 2, "STAGES": 4, "LOGIT": 0},
        {"SB": 4, "B": 32, "ST": 0, "RP": 4, "STAGES": 4, "LOGIT": 0},
        {"SB": 8, "B": 32, "ST": 2, "RP": 2, "STAGES": 4, "LOGIT": 1},
    ),
    "quantize": ({"A": 64, "HALVES": 0}, {"A": 32, "HALVES": 1}),
    "gate_quantize": ({"A": 64, "HALVES": 0},),
    "norm_quantize": ({"A": 64, "HALVES": 0}, {"A": 32, "HALVES": 1}),
    "embed": (_ROWS, {"SB": 8, "B": 32, "ST": 2}),
    "rope_write_kv": ({**_MODEL, "INTERLEAVED": 0}, {**_MODEL, "INTERLEAVED": 1}),
    "attention_chunks": (_MODEL, {"HEADS": 4, "KV_HEADS": 2, "D": 24}),
    "attention_merge_quantize": ({"HEADS": 28, "D": 128, "A": 64, "HALVES": 0},),
    "attention_prefill": (_MODEL, {"HEADS": 4, "KV_HEADS": 2, "D": 24}),
    "prepare_dense": ({"BFLOAT": 1}, {"BFLOAT": 0}),
    "dense": ({"LOGIT": 0},),
}


def _type(kernel: str, name: str) -> str:
    if kernel.startswith("linear") or kernel == "embed":
        return "uint32_t" if name == "w" else _TYPES.get(name, "float")
    if name == "w":
        return "__nv_bfloat16"
    return _TYPES.get(name, "float")


def stand_alone(kernel: KernelSource, template: dict[str, int], name: str) -> str:
    """A kernel with a signature as MLX writes it, without the header."""
    parameters = []
    for buffer in kernel.inputs:
        parameters.append(f"const {_type(kernel.name, buffer)}* {buffer}")
        if f"{buffer}_shape" in kernel.body:
            parameters.append(f"const __grid_constant__ Shape {buffer}_shape")
        if f"{buffer}_strides" in kernel.body:
            parameters.append(f"const __grid_constant__ Strides {buffer}_strides")
    parameters += [f"{_type(kernel.name, buffer)}* {buffer}" for buffer in kernel.outputs]
    constants = "".join(f"constexpr int {key} = {value};\n" for key, value in template.items())
    return f"__global__ void {name}({', '.join(parameters)}) {{\n{constants}{kernel.body}\n}}\n"


def translation_unit(kernels: Sequence[KernelSource]) -> str:
    """Every variant of the kernels of one file, ready for a CUDA compiler."""
    shapes = (
        "#include <cstdint>\n"
        "template <class T> struct Sizes {\n"
        "T v[8]; __device__ T operator[](int i) const { return v[i]; } };\n"
        "using Shape = Sizes<int32_t>; using Strides = Sizes<int64_t>;\n"
    )
    bodies = (
        stand_alone(kernel, template, f"{kernel.name}_{i}")
        for kernel in kernels
        for i, template in enumerate(VARIANTS.get(kernel.name, ({},)))
    )
    return shapes + kernels[0].header + "".join(bodies)
