"""The report of the experiments: as text, as JSON, and as one HTML page without other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Final

from scheduler_service.lab.acceptance import MOST_DRAFTS, Acceptance
from scheduler_service.lab.article import Divergence, Plan, Speed, Switch, TopTwo, VerifyCase
from scheduler_service.lab.line_plot import line_plot


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured, and where."""

    model: str
    weights_digest: str
    device: str
    numeric_classes: dict[str, str]  # by policy
    threshold_rows: int
    plan: Plan
    speed: Speed
    switch: Switch
    divergences: tuple[Divergence, ...]
    verify_cases: tuple[VerifyCase, ...]
    acceptances: tuple[Acceptance, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report; the first row of `rows` is not a heading."""

    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_STYLE: Final = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.2em .6em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)


def tables(report: Report) -> tuple[Table, ...]:
    """Return all tables."""
    return (
        _speed(report.speed),
        _switch(report.switch),
        _divergence(report),
        _top_two(report.divergences),
        _verify(report.verify_cases),
        _acceptance(report),
    )


def _speed(speed: Speed) -> Table:
    modes = tuple(speed.tokens_per_second)
    alone = speed.tokens_per_second[modes[0]]
    rows = []
    for index, count in enumerate(speed.concurrency):
        values = [speed.tokens_per_second[mode][index] for mode in modes]
        ratios = [f"{value / alone[index]:.2f}" for value in values[1:]]
        rows.append((str(count), *(f"{value:.0f}" for value in values), *ratios))
    return Table(
        "Decoding speed by concurrent sequences",
        "Tokens in a second over all sequences, by the median step; ratios are to unbatched.",
        ("sequences", *modes, *(f"{mode}, ratio" for mode in modes[1:])),
        tuple(rows),
    )


def _switch(switch: Switch) -> Table:
    pays = "in none of those tried" if switch.pays_from_rows is None else str(switch.pays_from_rows)
    rows = [
        (
            policy,
            "never" if switch.differs_from_rows[policy] is None
            else str(switch.differs_from_rows[policy]),
            _runs(switch.rows_tried, paths),
        )
        for policy, paths in switch.paths.items()
    ]  # fmt: skip
    return Table(
        "Where kernels switch",
        f"GEMM is faster than row-by-row GEMV from this many rows on: {pays}. "
        f"A row was computed beside others, {switch.rows_tried[-1]} rows at most in all.",
        ("policy", "a row differs from itself alone from rows", "kernel path by rows"),
        tuple(rows),
    )


def _runs(rows: Sequence[int], paths: Sequence[str]) -> str:
    """Return for example "gemv to 4, gemm to 8"."""
    last = dict(zip(paths, rows, strict=True))
    return ", ".join(f"{path} to {row}" for path, row in last.items())


def _place(index: int | None) -> str:
    return "-" if index is None else str(index)


def _divergence(report: Report) -> Table:
    rows, plan = [], report.plan
    for policy in report.numeric_classes:
        found = [each for each in report.divergences if each.policy == policy]
        digests = [each.first_digest for each in found]
        tokens = [each.first_token for each in found]
        rows.append(
            (
                policy,
                str(max((each.num_tokens for each in found), default=0)),
                f"{sum(each is not None for each in digests)} of {len(found)}",
                f"{sum(each is not None for each in tokens)} of {len(found)}",
                ", ".join(map(_place, digests)),
                ", ".join(map(_place, tokens)),
            )
        )
    return Table(
        "Greedy texts alone and in company",
        f"Each alone and beside {plan.neighbours} others: "
        "index of the first token that differs, - for none.",
        ("policy", "tokens each", "logits differ", "text differs", "first logits", "first token"),
        tuple(rows),
    )


def _top_two(divergences: Sequence[Divergence]) -> Table:
    def cell(top: TopTwo | None) -> str:
        if top is None:
            return ""
        return ", ".join(f"{i} ({x:.4f})" for i, x in zip(top.ids, top.logits, strict=True))

    rows = [
        (each.policy, str(each.text_index), str(each.first_token), cell(each.alone),
         cell(each.together))
        for each in divergences
        if each.first_token is not None
    ]  # fmt: skip
    return Table(
        "The two likeliest tokens where texts part",
        "Token ids and logits, or nothing where no text differed.",
        ("policy", "text", "at token", "alone", "in company"),
        tuple(rows),
    )


def _verify(cases: Sequence[VerifyCase]) -> Table:
    rows = [
        (
            each.policy,
            str(each.verify_logits_differ),
            "not told" if each.kv_positions_differ is None else str(each.kv_positions_differ),
            f"{each.later_logits_differ} of {each.later_tokens}",
        )
        for each in cases
    ]
    tokens = cases[0].step_tokens if cases else 0
    return Table(
        "Four verify rows beside another request's prompt",
        f"The shared step has {tokens} tokens. Compared with the four rows in a step of their own; "
        "later tokens run in steps of their own and read what the shared step left in the cache.",
        ("policy", "verify logits that differ", "cache positions that differ",
         "later logits that differ"),
        tuple(rows),
    )  # fmt: skip


def _acceptance(report: Report) -> Table:
    def share(accepted: int, proposed: int) -> str:
        return f"{accepted} of {proposed}" + (f" ({accepted / proposed:.1%})" if proposed else "")

    rows = [
        (
            each.policy,
            str(each.num_tokens),
            share(each.accepted_alone, each.proposed_alone),
            share(each.accepted_together, each.proposed_together),
            f"{each.texts_differ} of {each.num_texts}",
        )
        for each in report.acceptances
    ]
    return Table(
        "Drafts accepted",
        f"Greedy texts with {MOST_DRAFTS} drafts by lookup at most in a step, one text at a time "
        "and all texts at once.",
        ("policy", "tokens each", "accepted alone", "accepted together", "texts that differ"),
        tuple(rows),
    )


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    return asdict(report)


def _head(report: Report) -> str:
    return (
        f"{report.model} on {report.device}, policy threshold at {report.threshold_rows} rows, "
        f"{report.plan.rounds} rounds"
    )


def as_text(report: Report) -> str:
    """Return the report for a terminal."""
    parts = [_head(report)]
    for table in tables(report):
        if not table.rows:
            continue
        columns = list(zip(table.headings, *table.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (table.headings, *table.rows)
        ]
        parts.append("\n".join((table.title, table.note, *lines)))
    return "\n\n".join(parts)


def as_html(report: Report) -> str:
    """Return the report as one page; all that it shows is in it."""
    parts = [f"<p>{escape(_head(report))}. Weights {escape(report.weights_digest[:16])}.</p>"]
    classes = ", ".join(f"{name}: {each}" for name, each in report.numeric_classes.items())
    parts.append(f"<p>Numeric classes: {escape(classes)}.</p>")
    parts.append(
        line_plot(
            report.speed.concurrency,
            report.speed.tokens_per_second,
            x_label="concurrent sequences",
            y_label="tokens in a second",
        )
    )
    parts.extend(map(_html_table, tables(report)))
    body = "\n".join(parts)
    title = "Kernel policies on this machine"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<h2>{escape(table.title)}</h2>\n<p>{escape(table.note)}</p>"
    if not table.rows:
        return head
    lines = [row(table.headings, "th"), *(row(each, "td") for each in table.rows)]
    return head + "\n<table>\n" + "\n".join(lines) + "\n</table>"
