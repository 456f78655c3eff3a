"""The few edits that make Metal text acceptable to clang as C++: what macros cannot express."""

from __future__ import annotations

import re

from tests.metal_on_cpu.harness.errors import MetalError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[.*\])?)\s*$", re.DOTALL)
_FIRST_DECLARATOR = re.compile(r"\s*(.+?)\s*\b(\w+)\s*((?:\[.*\])?)\s*$", re.DOTALL)
_OPENING, _CLOSING = "([{<", ")]}>"


def blank_comments(text: str) -> str:
    """Comments become spaces; every other character keeps its place."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Splits at separators that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def threadgroup_variables(text: str) -> list[tuple[int, int, list[tuple[str, str, str]]]]:
    """Declarations of threadgroup variables: (begin, end, [(type, name, dimensions)]).

    Pointers and references to threadgroup memory are not declarations of variables. What looks
    like one and is not understood raises MetalError: left alone it would silently become private.
    """
    plain = blank_comments(text)
    found = []
    for word in re.finditer(r"(?<![\w.])threadgroup\b", plain):
        before = plain[: word.start()].rstrip()
        if before and before[-1] not in ";{}":
            continue  # a qualifier of a parameter, a template argument or a cast
        end = plain.find(";", word.end())
        declaration = plain[word.end() : end]
        outside = re.sub(r"\[[^\]]*\]", "", declaration)
        if any(char in outside for char in "*&"):
            continue
        parts = split_outside_brackets(declaration)
        first = _FIRST_DECLARATOR.match(parts[0])
        others = [_DECLARATOR.match(part) for part in parts[1:]]
        if end < 0 or first is None or not all(others) or any(c in outside for c in "=()"):
            raise MetalError(f"[rewrite] threadgroup declaration not understood: {declaration!r}")
        kind = first.group(1)
        names = [(kind, first.group(2), first.group(3))]
        names += [(kind, m.group(1), m.group(2)) for m in others if m is not None]
        found.append((word.start(), end + 1, names))
    return found


def rewrite(text: str) -> str:
    """Metal text as C++ for the shim; lines stay, but for function constants.

    A function constant is 0 unless the text defines EMU_CONSTANT_<index>.
    """
    out, position = [], 0
    for begin, end, names in threadgroup_variables(text):
        places = [
            f"auto& {n} = ::metal::emu_site<{t} {d}, __COUNTER__>::get();" for t, n, d in names
        ]
        lines = "\n" * text.count("\n", begin, end)
        out += [text[position:begin], " ".join(places), lines]
        position = end
    text = "".join([*out, text[position:]])
    text = re.sub(
        r"#pragma\s+METAL\s+fp\s+contract\s*\(\s*(\w+)\s*\)", r"#pragma clang fp contract(\1)", text
    )
    text = re.sub(
        r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]\s*;",
        r"\n#ifndef EMU_CONSTANT_\3\n#define EMU_CONSTANT_\3 0\n#endif\n"
        r"static constexpr \1 \2 = \1(EMU_CONSTANT_\3);",
        text,
    )
    text = re.sub(r"\btemplate\s*\[\[\s*host_name\([^;]*;", "", text)
    text = re.sub(r"\[\[\s*threadgroup\(\d+\)\s*\]\]", "", text)
    vector = r"(?<![\w:<])((?:metal::)?vec<\s*[\w:]+\s*,\s*[\w:]+\s*>)\s*\((?!\))"
    return re.sub(vector, r"::metal::emu_construct<\1>(", text)
