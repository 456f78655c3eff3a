"""What the text of the kernels must and must not contain."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from isobatch_kernels.metal.source import FAMILIES, family_text, load_kernels
from isobatch_kernels.self_test import tiny_program
from tests.metal_on_cpu.backends import metal_backend
from tests.metal_on_cpu.cases import activations, linear
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory
from tests.metal_on_cpu.harness.lint import address_space_errors, rule_errors
from tests.metal_on_cpu.harness.rewrite import threadgroup_variables
from tests.metal_on_cpu.harness.signature import parse_signature
from tests.support.kernel_programs import Row, make_step

HOST_MATH = re.compile(
    r"\bU (?!emu_|_Unwind|__gmon|__cxa|_ITM|__stack|memset|memcpy|__truncsfbf2)(\S+)"
)
DIVISION = re.compile(r"\bv?(div|sqrt)(ss|ps|sd|pd)\b|\bvr(cp|sqrt)\w*\b")


@pytest.fixture(scope="module")
def factory() -> EmulatedKernelFactory:
    """Texts of every kernel as launched: a few steps of a model, and the cases of other kernels."""
    kernels = EmulatedKernelFactory()
    backend = metal_backend(tiny_program(np.random.default_rng(7)), kernels)
    backend.run(make_step([Row([1] * 30, 0, (1, 2)), Row([2], 0, (3,))]))
    backend.run(make_step([Row([1], 30, (1, 2))], token_sources=np.array([1], np.int32)))
    backend.run(make_step([Row([1], 270, tuple(range(20)))]))
    for case in (*activations.CASES[:4], *linear.CASES):
        case(kernels)
    return kernels


def test_every_kernel_is_looked_at(factory: EmulatedKernelFactory) -> None:
    """No kernel escapes the tests of this file."""
    launched = {name.removeprefix("isobatch_") for name in factory.launches}
    edits_only = {"apply_edits"}
    assert launched | edits_only == set(load_kernels())


def test_address_spaces(factory: EmulatedKernelFactory) -> None:
    """Clang's address-space checks on the text that MLX generates."""
    errors = {s.instance: address_space_errors(t, s) for t, s in factory.texts.items()}
    assert {name: found for name, found in errors.items() if found} == {}


def test_rules(factory: EmulatedKernelFactory) -> None:
    """Contraction off, exact functions, MSL 3.1, qualified pointers, float literals."""
    errors = {s.instance: rule_errors(t) for t, s in factory.texts.items()}
    assert {name: found for name, found in errors.items() if found} == {}


@pytest.mark.skipif(not shutil.which("objdump"), reason="objdump (binutils) was not found")
def test_no_library_function_and_no_division_decides_a_bit(factory: EmulatedKernelFactory) -> None:
    """The compiled kernels call nothing of a math library and hold no division or square root."""
    for program in set(factory.programs):
        symbols = _output("nm", "-D", "--undefined-only", str(program))
        assert HOST_MATH.findall(symbols) == [], program
        code = _output("objdump", "-d", "--no-show-raw-insn", str(program))
        assert DIVISION.search(code) is None, program


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


FAULTY = {
    "device to thread pointer": "thread const float* p = a; o[0] = p[0];",
    "device to threadgroup pointer": "threadgroup float x[8]; device float* p = x; o[0] = p[0];",
    "write through const": "((const device float*)o)[0] = 1.0f;",
    "float to bfloat": "bfloat x = a[0]; o[0] = float(x);",
}


@pytest.mark.parametrize("fault", FAULTY)
def test_the_lint_finds_address_space_faults(fault: str) -> None:
    """Faults that C++ does not see."""
    text = (
        "[[kernel]] void custom_kernel_x(const device float* a [[buffer(0)]],"
        " device float* o [[buffer(1)]]) {\n%s\n}"
    )
    signature = parse_signature(text)
    assert address_space_errors(text % "o[0] = a[0];", signature) == []
    assert address_space_errors(text % FAULTY[fault], signature) != []


@pytest.mark.parametrize(
    "line",
    [
        "float y = exp(x);",
        "float y = metal::precise::rsqrt(x);",
        "float* p = q;",
        "double y = 1;",
        "float y = x * 0.5;",
        "bfloat y;",
    ],
)
def test_the_lint_finds_breaches_of_rules(line: str) -> None:
    """One line each."""
    good = "#pragma METAL fp contract(off)\nfloat f(float x) { return fma(x, 0.5f, 1e-3f); }\n"
    assert rule_errors(good) == []
    assert rule_errors(good + line) != []
    assert rule_errors(good.replace("contract(off)", "contract(on)")) != []


def test_threadgroup_variables_stand_in_the_outermost_scope() -> None:
    """Where Metal wants them: no open brace before the declaration."""
    for name, kernel in load_kernels().items():
        for begin, _, _ in threadgroup_variables(kernel.body):
            before = kernel.body[:begin]
            assert before.count("{") == before.count("}"), name


def test_every_file_is_read() -> None:
    """No .metal file lies unused, and every one begins with a comment that says what it is."""
    folder = resources.files("isobatch_kernels.metal")
    files = {Path(str(f)).stem for f in folder.iterdir() if f.name.endswith(".metal")}
    assert files == set(FAMILIES)
    assert all(family_text(name).startswith("// ") for name in FAMILIES)


def test_the_page_lists_every_kernel(factory: EmulatedKernelFactory) -> None:
    """docs/metal.md: one line a kernel, with the threads that it is launched with."""
    page = (Path(__file__).parents[2] / "docs" / "metal.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (\d+) \|", page, re.MULTILINE))
    assert set(listed) == set(load_kernels())
    for name, largest in factory.largest.items():
        assert largest.threads_per_group == int(listed[name.removeprefix("isobatch_")]), name


def test_constants_are_those_of_the_contract() -> None:
    """Bit patterns in common.metal against the C++ header, by name of the value."""
    header = (Path(__file__).parents[2] / "kernels/isobatch_kernels/cpp/contract.h").read_text()
    text = family_text("common")
    for name in ("kNonFiniteBits", "kBlockFloorBits", "kDenseRowFloorBits"):
        pattern = rf"{name} = (0x[0-9A-Fa-f]+)u"
        assert re.findall(pattern, text) == re.findall(pattern, header), name
    for metal, native in (
        ("kInputFloorBits", "kInputFloor"),
        ("kQueryFloorBits", "kQueryFloor"),
        ("kFloor40Bits", "kOutputFloor"),
    ):
        bits = int(re.findall(rf"{metal} = (0x\w+)u", text)[0], 16)
        value = float.fromhex(re.findall(rf"{native} = (0x1p-\d+)f", header)[0])
        assert np.array([bits], np.uint32).view(np.float32)[0] == value, metal
