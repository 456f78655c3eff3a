"""What the dashboard shows, as data: rows of panels, each with its queries.

Divisors have a floor, so that an idle machine shows 0. Every panel selects the process that owns
its metric by the variable of that process, so choosing a scheduler never empties the executor's
panels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

RATE = "[$__rate_interval]"


class Kind(Enum):
    """How a panel draws."""

    LINES = "lines"
    STACKED = "stacked"
    HEATMAP = "heatmap"
    STAT = "stat"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and the name of its lines."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `unit` is Grafana's name of it."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...] = field(default=())


def _labels(owner: str, more: str, *, has_model: bool) -> str:
    parts = [f'instance=~"${owner}"']
    if has_model:
        parts.append('model=~"$model"')
    if more:
        parts.append(more)
    return "{" + ", ".join(parts) + "}"


def scheduler(name: str, more: str = "", *, has_model: bool = True) -> str:
    """Return a selector of a scheduler's metric."""
    return f"isobatch_scheduler_{name}{_labels('scheduler', more, has_model=has_model)}"


def executor(name: str, more: str = "", *, has_model: bool = True) -> str:
    """Return a selector of an executor's metric."""
    return f"isobatch_executor_{name}{_labels('executor', more, has_model=has_model)}"


def rate(selector: str, by: str = "model") -> str:
    """Return the sum of a counter's rates."""
    return f"sum by ({by}) (rate({selector}{RATE}))"


def share(part: str, whole: str, ignoring: str) -> str:
    """Return one sum over another that lacks the labels `ignoring`."""
    return f"{part} / ignoring ({ignoring}) group_left () clamp_min({whole}, 1e-9)"


def quantiles(selector: str, *, by: str = "model") -> tuple[Query, ...]:
    """Return the median, p95 and p99 of a histogram."""
    return tuple(
        Query(
            # Without observations a quantile is NaN; such points are left out.
            f"histogram_quantile({q}, {rate(selector, f'{by}, le')}) >= 0",
            f"{name} {{{{{by}}}}}",
        )
        for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


_LINEAR = 'op="linear"'
_KERNEL_ROWS = executor("kernel_rows_total", _LINEAR, has_model=False)
_DISPATCHES = executor("kernel_dispatches_total", has_model=False)
_LINEAR_DISPATCHES = executor("kernel_dispatches_total", _LINEAR, has_model=False)
_PHASES = scheduler("step_phase_seconds_sum")
_EXECUTOR_PHASES = executor("step_phase_seconds_sum")
_FORWARD = executor("forward_seconds_bucket")
_WALL = scheduler("step_wall_seconds_total")
_PROCESSES = 'job=~"isobatch-.*"'

THROUGHPUT = Row("Throughput", (
    Panel("Tokens", "Generated tokens, and known tokens by where their keys and values came from.",
          "short", (Query(rate(scheduler("generated_tokens_total")), "generated {{model}}"),
                    Query(rate(scheduler("prompt_tokens_total"), "model, source"), "{{source}}"))),
    Panel("Concurrency", "Requests that hold cache, and requests that wait.", "short",
          (Query(scheduler("requests_running"), "running"),
           Query(scheduler("requests_waiting"), "waiting")), Kind.STACKED),
    Panel("Requests ended", "By how they ended.", "reqps",
          (Query(rate(scheduler("requests_total"), "model, outcome"), "{{outcome}}"),),
          Kind.STACKED),
))  # fmt: skip

QUEUE = Row("Queue", (
    Panel("Waiting by class", "Requests that wait, by priority class.", "short",
          (Query(f"sum by (model, priority) ({scheduler('requests_waiting_by_class')})",
                 "{{priority}}"),), Kind.STACKED),
    Panel("Waiting tokens", "Known tokens of requests that wait.", "short",
          (Query(scheduler("waiting_tokens"), "{{model}}"),)),
    Panel("Refused", "Requests that were not taken, by why.", "reqps",
          (Query(rate(scheduler("refusals_total"), "model, reason"), "{{reason}}"),), Kind.STACKED),
    Panel("Paused", "Requests that wait for a client that reads slowly.", "short",
          (Query(scheduler("streams_paused"), "{{model}}"),)),
))  # fmt: skip

LATENCY = Row("Latency", (
    Panel("Time to first token", "From a request's arrival to its first token.", "s",
          quantiles(scheduler("time_to_first_token_seconds_bucket"))),
    Panel("Inter-token latency", "Between two tokens of a request.", "s",
          quantiles(scheduler("inter_token_latency_seconds_bucket"))),
    Panel("Queue time", "From arrival to the first token row.", "s",
          quantiles(scheduler("queue_time_seconds_bucket"))),
    Panel("Request duration", "From arrival to the end.", "s",
          quantiles(scheduler("request_duration_seconds_bucket"))),
))  # fmt: skip

STEPS = Row("Steps", (
    Panel("Where the scheduler's time goes", "Parts of the wall time of steps, seconds a second.",
          "s", (Query(rate(_PHASES, "model, phase"), "{{phase}}"),), Kind.STACKED),
    Panel("Where the executor's time goes", "Parts of a step's time from arrival to answer.",
          "s", (Query(rate(_EXECUTOR_PHASES, "model, phase"), "{{phase}}"),), Kind.STACKED),
    Panel("Phases over wall time", "1 where the phases account for all of a step's time.",
          "percentunit",
          (Query(f"{rate(_PHASES)} / clamp_min({rate(_WALL)}, 1e-9)", "{{model}}"),)),
    Panel("Rows per step", "How many token rows steps have.", "short",
          (Query(f"sum by (le) (increase({executor('step_rows_bucket')}{RATE}))", "{{le}}"),),
          Kind.HEATMAP),
    Panel("Tokens per step", "How many tokens steps have.", "short",
          (Query(f"sum by (le) (increase({executor('step_tokens_bucket')}{RATE}))", "{{le}}"),),
          Kind.HEATMAP),
    Panel("Mean rows per step by phase", "Token rows of steps with any of a phase.", "short",
          (Query(f"{rate(scheduler('step_rows_sum'), 'model, phase')} / clamp_min("
                 f"{rate(scheduler('step_rows_count'), 'model, phase')}, 1e-9)", "{{phase}}"),)),
    Panel("Steps against the cost curve",
          "The executor's time of steps over what its cost curve said: above 1 it is slower now.",
          "short", (Query(f"{rate(scheduler('step_measured_seconds_total'))} / clamp_min("
                          f"{rate(scheduler('step_predicted_seconds_total'))}, 1e-9)",
                          "{{model}}"),)),
    Panel("Bound on a step", "Longest step that prompts may make while others decode; 0: no bound.",
          "s", (Query(scheduler("step_bound_seconds"), "{{model}}"),)),
    Panel("Drafted tokens", "Verified by steps, and of these accepted: drawn as well.", "short",
          (Query(rate(scheduler("draft_tokens_total"), "model, proposer"), "{{proposer}} drafted"),
           Query(rate(scheduler("accepted_draft_tokens_total"), "model, proposer"),
                 "{{proposer}} accepted"))),
    Panel("Forward pass", "Median time of steps with decode rows, prefill rows, both.",
          "s", (Query(f"histogram_quantile(0.5, {rate(_FORWARD, 'model, phase, le')}) >= 0",
                      "{{phase}}"),)),
))  # fmt: skip

KERNELS = Row("Kernels", (
    Panel("Kernel path share of linear layers", "Share of dispatches by path.", "percentunit",
          (Query(share(rate(_LINEAR_DISPATCHES, "path, unit"),
                       f"sum without (path, unit) ({rate(_LINEAR_DISPATCHES, 'path, unit')})",
                       "path, unit"), "{{path}} {{unit}}"),), Kind.STACKED),
    Panel("Rows by kernel path", "Rows of linear layers, summed over all layers.", "short",
          (Query(rate(_KERNEL_ROWS, "path, unit"), "{{path}} {{unit}}"),), Kind.STACKED),
    Panel("Rows per dispatch", "Mean number of rows that one dispatch of a linear layer sees.",
          "short", (Query(f"{rate(_KERNEL_ROWS, 'path')} / clamp_min("
                          f"{rate(_LINEAR_DISPATCHES, 'path')}, 1e-9)", "{{path}}"),)),
    Panel("Dispatches by operation", "Kernel dispatches of every kind of work.", "short",
          (Query(rate(_DISPATCHES, "op"), "{{op}}"),), Kind.STACKED),
    Panel("Effective weight bandwidth",
          "Bytes of weights that steps had to read, over the time of their forward passes.", "Bps",
          (Query(f"{rate(executor('weight_bytes_read_total'))} / clamp_min("
                 f"{rate(executor('forward_seconds_sum'))}, 1e-9) * "
                 # A scrape may fall between the two counts of one step.
                 f"({rate(executor('forward_seconds_sum'))} > bool 1e-3)", "{{model}}"),)),
    Panel("Self-test", "What the kernels' self-test found at start.", "short",
          (Query(executor("self_test_state", has_model=False), "{{state}}"),), Kind.STAT),
    Panel("Numeric class", "States of two classes never meet.", "short",
          (Query(executor("model_info"), "{{model}} {{numeric_class}}"),), Kind.STAT),
))  # fmt: skip

_DECODE_STEPS = executor("decode_steps_total")
_DECODE_SECONDS = executor("decode_seconds_total")
_EXPECTED_SECONDS = executor("decode_expected_seconds_total")


def _mean_by_rows(seconds: str) -> str:
    """Return the mean time of decode steps by rows, where there were any."""
    by = "model, rows"
    steps = rate(_DECODE_STEPS, by)
    return f"{rate(seconds, by)} / clamp_min({steps}, 1e-9) and {steps} > 0"


SPEED = Row("Speed against the profile", (
    Panel("Decode steps against the cost curve",
          "Mean time of steps of decode rows, by rows, and what the curve expects of them.", "s",
          (Query(_mean_by_rows(_DECODE_SECONDS), "{{rows}} rows"),
           Query(_mean_by_rows(_EXPECTED_SECONDS), "{{rows}} rows, expected"))),
    Panel("Throttle check",
          "Throughput over that of the profile: by the hourly check, and of decode steps under "
          "load. Far below 1, something slows the machine; a launchd job without ProcessType "
          "Interactive gets a slow GPU.", "percentunit",
          (Query(executor("speed_ratio"), "check, {{rows}} rows"),
           Query(f"{rate(_EXPECTED_SECONDS)} / clamp_min({rate(_DECODE_SECONDS)}, 1e-9) and "
                 f"{rate(_DECODE_STEPS)} > 0", "under load"))),
    Panel("Cost curve", "Time of a step by phase and tokens, without context.", "s",
          (Query(executor("cost_seconds", 'context="0"'), "{{phase}} {{tokens}}"),), Kind.STAT),
    Panel("Profile in force", "1 for where it came from.", "short",
          (Query(executor("profile_info"), "{{model}} {{origin}}"),), Kind.STAT),
    Panel("Age of profile and check", "Since the profile was measured and speed was checked.", "s",
          (Query(f"time() - {executor('profile_measured_timestamp_seconds')}", "profile"),
           Query(f"time() - {executor('speed_check_timestamp_seconds')}", "check")), Kind.STAT),
))  # fmt: skip

CACHE = Row("Key/value cache", (
    Panel("Blocks", "Blocks of the pool by state.", "short",
          (Query(f"sum by (model, state) ({executor('kv_blocks')})", "{{state}}"),), Kind.STACKED),
    Panel("Preemptions", "Requests that lost their cached state.", "short",
          (Query(rate(scheduler("preemptions_total"), "model, reason"), "{{reason}}"),)),
    Panel("Steps refused for want of blocks", "Steps by outcome.", "short",
          (Query(rate(executor("steps_total"), "model, outcome"), "{{outcome}}"),)),
    Panel("Written positions", "Cache positions by the numeric class of their provenance.", "short",
          (Query(rate(executor("kv_positions_written_total"), "model, numeric_class"),
                 "{{numeric_class}}"),)),
    Panel("Prefix cache: positions", "Positions that new sequences looked for.", "short",
          (Query(rate(executor("prefix_cache_tokens_total"), "model, result"), "{{result}}"),),
          Kind.STACKED),
    Panel("Prefix cache: sequences", "New sequences that looked for a cached beginning.", "short",
          (Query(rate(executor("prefix_cache_lookups_total"), "model, result"), "{{result}}"),)),
    Panel("Prefix cache: blocks", "Blocks that can be found.", "short",
          (Query(executor("prefix_cache_blocks"), "{{tier}}"),)),
    Panel("Prefix cache: evictions", "Blocks taken out to make room.", "short",
          (Query(rate(executor("prefix_cache_evictions_total"), "model, tier"), "{{tier}}"),)),
    Panel("Prefix cache on disk", "Blocks by what became of them; 1 while the disk takes none.",
          "short",
          (Query(rate(executor("prefix_disk_events_total"), "model, event"), "{{event}}"),
           Query(executor("prefix_disk_paused"), "paused"))),
))  # fmt: skip

HEALTH = Row("Health", (
    Panel("Up", "1 while a process answers.", "short",
          (Query(f"up{{{_PROCESSES}}}", "{{job}} {{instance}}"),), Kind.STAT),
    Panel("Executor connected", "1 while a session is open.", "short",
          (Query(scheduler("executor_connected", has_model=False), "{{instance}}"),), Kind.STAT),
    Panel("Time since the last step", "Grows while idle; a fault only where requests run.", "s",
          (Query(f"time() - {scheduler('last_step_timestamp_seconds')}", "{{model}}"),)),
    Panel("Rows with a NaN or an infinity", "Each ends its own request.", "short",
          (Query(rate(executor("non_finite_rows_total")), "{{model}}"),)),
    Panel("Steps ahead", "Steps sent before the answer to the last one, and rows in vain.", "cps",
          (Query(rate(scheduler("steps_ahead_total")), "steps ahead {{model}}"),
           Query(rate(scheduler("vain_rows_total")), "rows in vain {{model}}"))),
    Panel("Executor reconnects", "By what the new connection found.", "short",
          (Query(rate(scheduler("executor_reconnects_total"), "model, reason"), "{{reason}}"),)),
    Panel("Memory", "Resident memory of both processes, and the executor's cache pool in it.",
          "bytes", (Query(f"process_resident_memory_bytes{{{_PROCESSES}}}", "{{job}}"),
                    Query(executor("memory_bytes", 'kind="kv_pool"', has_model=False),
                          "cache pool"))),
    Panel("Processor cores in use", "Of both processes.", "short",
          (Query(f"rate(process_cpu_seconds_total{{{_PROCESSES}}}{RATE})", "{{job}}"),)),
    Panel("Traces of requests", "Bytes of closed traces, by model.", "Bps",
          (Query(rate(scheduler("trace_bytes_total")), "{{model}}"),)),
    Panel("Scrape duration", "What watching costs.", "s",
          (Query(f"scrape_duration_seconds{{{_PROCESSES}}}", "{{job}}"),)),
    Panel("Builds", "Version and device of each process.", "short",
          (Query(scheduler("build_info", has_model=False), "scheduler {{version}}"),
           Query(executor("build_info", has_model=False), "executor {{version}} {{device}}")),
          Kind.STAT),
))  # fmt: skip

ROWS = (THROUGHPUT, QUEUE, LATENCY, STEPS, KERNELS, SPEED, CACHE, HEALTH)

# Name, label and query of each variable. None of them depends on another one.
VARIABLES = (
    ("scheduler", "Scheduler", "label_values(isobatch_scheduler_build_info, instance)"),
    ("executor", "Executor", "label_values(isobatch_executor_build_info, instance)"),
    ("model", "Model", "label_values(isobatch_executor_model_info, model)"),
)
