"""Trains the draft model on one GPU within a given time, and leaves a GGUF file.

    python -m training.distill --teacher SmolLM2-135M-Instruct.Q4_1.gguf --out draft --seconds 630

The teacher writes for less than half of the time. In between the student learns from all that is
written, and in the last quarter its weights are rounded to 4 bits as they will be stored. A
checkpoint with its file is written every two minutes; an error is logged and the work goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from executor_service.models.tokenizer_gguf import tokenizer_from_gguf
from training.generate import DRAWN_ANSWER, GREEDY_ANSWER, Texts, Writer
from training.gguf_file import read_gguf, write_gguf
from training.labels import Labels, label
from training.learn import Learner, held_out_report, line
from training.prompts import Prompts
from training.student import (
    EMBED,
    Shape,
    from_file,
    merged,
    round_weights,
    shape_of,
    to_file,
    within_half,
)

WRITING_SHARE: Final = 0.45  # of the time, at most
WRITING_ENDS: Final = 0.72  # of the time: afterwards the student only learns
ROUNDING_STARTS: Final = 0.75
CHECKPOINT_SECONDS: Final = 120.0
LOG_SECONDS: Final = 10.0
RESERVED_SECONDS: Final = 12.0  # for the last file and its report
# Each kind of batch: its share of the rows, kinds of text, and length of the sequences as a
# multiple of --length.
BATCHES: Final = (
    (1.0, ("conversation", "task"), 1.0),
    (0.75, ("code edit", "summary", "continuation", "code edit", "summary"), 1.25),
    (1.0, ("task", "conversation"), 1.0),
    (0.75, ("summary", "code edit"), 1.25),
    (0.4, ("task", "conversation", "summary"), 2.5),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts with what the teacher says about them."""

    texts: Texts
    labels: Labels


class Run:
    """Everything of one training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the teacher and draw the student's first weights."""
        self.args = args
        self.began = time.monotonic()
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.is_gpu = args.device.startswith("cuda")
        dtype = torch.float16 if self.is_gpu else torch.float32
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        # Its plans are made anew for every length, and lengths change with every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        header, tensors = read_gguf(Path(args.teacher))
        self.metadata = dict(header.metadata)
        vocab_size = tensors[EMBED].shape[0]
        own_shape = shape_of(self.metadata, vocab_size)
        scaled, self.teacher_shape = within_half(tensors, own_shape)
        self.teacher = merged(
            from_file(scaled, self.teacher_shape, dtype, args.device), self.teacher_shape
        )
        from tokenizers import Tokenizer

        data = tokenizer_from_gguf(self.metadata, args.teacher)
        self.tokenizer = Tokenizer.from_str(data.tokenizer_json.decode())
        self.shape = Shape(
            hidden_size=args.hidden,
            intermediate_size=args.inner,
            num_layers=args.layers,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=64,
            vocab_size=vocab_size,
            rope_base=own_shape.rope_base,
            norm_epsilon=own_shape.norm_epsilon,
            context_length=own_shape.context_length,
        )
        self.learner = Learner(self.shape, torch.from_numpy(tensors[EMBED]).to(args.device), args)
        self.prompts = Prompts(self.encode_all, args.seed, max_files=args.max_files)
        self.writer = Writer(self.teacher, self.teacher_shape, self.encode, args.device, dtype)
        self.rng = random.Random(args.seed + 1)
        self.batches: list[Batch] = []
        self.held_out: list[Texts] = []
        self.held_out_kinds: set[str] = set()
        self.num_batches = 0
        self.written_tokens = 0
        self.writing_seconds = 0.0
        self.log(
            f"start: {self.learner.num_parameters / 1e6:.2f} M parameters, "
            f"{self.prompts.sizes()}, {args}"
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        found = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [list(each.ids) for each in found]

    def elapsed(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self.began

    def progress(self) -> float:
        """Return the part of the time for work that is over, 0 to 1."""
        whole = max(1.0, float(self.args.seconds) - RESERVED_SECONDS)
        return min(1.0, self.elapsed() / whole)

    def log(self, text: str, **values: object) -> None:
        """Print a line and keep its values."""
        print(f"[{self.elapsed():7.1f} s] {text}", flush=True)
        if values:
            with (self.out / "log.jsonl").open("a") as file:
                file.write(json.dumps({"seconds": round(self.elapsed(), 1), **values}) + "\n")

    def guarded(self, what: str, work: Callable[[], None]) -> bool:
        """Do something; an error is logged, and memory that it left is given back."""
        try:
            work()
        except Exception:
            self.log(f"{what} failed:\n{traceback.format_exc()}", failed=what)
            if self.is_gpu:
                torch.cuda.empty_cache()
            return False
        return True

    def write(self) -> None:
        """Let the teacher write a batch and read it; the first of a kind hold out some rows."""
        share, kinds, part = BATCHES[self.num_batches % len(BATCHES)]
        self.num_batches += 1
        count, length = (
            max(1, int(self.args.rows * share) // len(kinds)),
            round(self.args.length * part),
        )
        began = time.monotonic()
        rows = [row for kind in kinds for row in self.prompts.rows(kind, count)]
        num_learnt = len(rows)
        for kind in dict.fromkeys(kinds):
            if kind not in self.held_out_kinds:
                rows += self.prompts.rows(kind, self.args.held_out, held_out=True)
        texts = self.writer.write(rows, length, self.args.seed + 1000 + self.num_batches)
        middle = time.monotonic()
        labels = label(self.teacher, self.teacher_shape, texts.tokens[:num_learnt])
        if self.is_gpu:
            torch.cuda.synchronize()
        self.batches.append(Batch(texts.rows(0, num_learnt), labels))
        if num_learnt < len(rows):
            self.held_out.append(texts.rows(num_learnt, len(rows)))
            self.held_out_kinds.update(self.held_out[-1].kinds)
        self.prompts.add_written(self._passages(self.batches[-1].texts, 512))
        took = time.monotonic() - began
        num_tokens = texts.tokens.numel()
        self.written_tokens += num_tokens
        self.writing_seconds += took
        self.log(
            f"wrote {len(rows)} x {length} of {'+'.join(dict.fromkeys(kinds))}: "
            f"{num_tokens / took:,.0f} tokens/s, reading took {time.monotonic() - middle:.1f} s",
            written=self.written_tokens,
            tokens_per_second=num_tokens / took,
        )
        if self.num_batches <= len(BATCHES):
            text = self.tokenizer.decode(texts.tokens[0, :160].tolist(), skip_special_tokens=False)
            self.log(f"a {rows[0].kind}: {text!r}")

    def _passages(self, texts: Texts, count: int) -> list[str]:
        """Return first answers of some rows, as texts for later summaries."""
        every = max(1, len(texts.kinds) // count)
        rows = texts.tokens[::every].tolist()
        origins = texts.origins[::every].tolist()
        found = []
        for tokens, origin in zip(rows, origins, strict=True):
            answer: list[int] = []
            for token, source in zip(tokens, origin, strict=True):
                if source in (DRAWN_ANSWER, GREEDY_ANSWER):
                    answer.append(token)
                elif answer:
                    break
            if 60 <= len(answer) <= 260:
                text = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
                if "```" not in text:
                    found.append(" ".join(text.split()))
        return found

    def learn(self) -> None:
        """Take one step on rows of a batch that is drawn by its size."""
        batch = self.rng.choices(
            self.batches, [each.texts.tokens.numel() for each in self.batches]
        )[0]
        count, length = batch.texts.tokens.shape
        rows = max(1, self.args.step_tokens // length)
        index = torch.tensor(
            [self.rng.randrange(count) for _ in range(rows)], device=self.args.device
        )
        progress = self.progress()
        self.learner.step(
            batch.texts.tokens[index],
            batch.texts.origins[index],
            Labels(batch.labels.ids[index], batch.labels.log_probabilities[index]),
            progress=progress,
            is_rounded=progress >= ROUNDING_STARTS,
        )

    def export(self, name: str) -> None:
        """Write a file with the weights as they are now, and a report on held-out texts."""
        metadata: dict[str, object] = {
            key: value
            for key, value in self.metadata.items()
            if key.startswith("tokenizer.") or key in ("general.license", "general.languages")
        }
        metadata = {
            "general.architecture": "llama",
            "general.type": "model",
            "general.name": "SmolLM2 draft",
            "general.description": "Drafts for SmolLM2-135M-Instruct Q4_1, distilled from it",
            "general.file_type": 3,
            "general.quantization_version": 2,
            **self.shape.metadata(),
            **metadata,
        }
        weights = self.learner.weights()
        path = self.out / f"{name}.gguf"
        partial = self.out / f"{name}.partial"
        write_gguf(partial, metadata, to_file(weights, self.shape))
        partial.rename(path)
        self.log(f"{path}: {path.stat().st_size:,} bytes")
        rounded = round_weights(weights)
        for texts in self.held_out:
            report = held_out_report(rounded, self.shape, texts, self.is_gpu)
            for each in report:
                self.log(
                    f"held out: {each}",
                    report=each,
                    file=name,
                    progress=self.progress(),
                    learnt=self.learner.num_tokens,
                )


def parsed() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--start", help="a file of this shape to go on from")
    parser.add_argument("--seconds", type=float, default=630.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=576)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=48, help="rows of each kind")
    parser.add_argument("--step-tokens", type=int, default=49152)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--max-files", type=int, default=400)
    return parser.parse_args()


def main() -> None:
    """Train until the time is over."""
    run = Run(parsed())
    args: Any = run.args
    last_log = last_checkpoint = run.elapsed()
    learnt, failures = 0, 0
    while run.progress() < 1.0 and failures < 20:
        may_write = run.progress() < WRITING_ENDS
        is_behind = run.writing_seconds < WRITING_SHARE * run.elapsed()
        if not run.batches or (may_write and is_behind):
            if not run.guarded("write", run.write):
                failures += 1
                args.rows = max(8, args.rows // 2)
            continue
        if not run.guarded("learn", run.learn):
            failures += 1
            args.step_tokens = max(1024, args.step_tokens // 2)
        now = run.elapsed()
        if now - last_log >= LOG_SECONDS:
            speed = (run.learner.num_tokens - learnt) / (now - last_log)
            values = run.learner.values(speed)
            run.log(line(values), **values)
            last_log, learnt = now, run.learner.num_tokens
        if now - last_checkpoint >= CHECKPOINT_SECONDS:
            run.guarded("checkpoint", lambda: run.export("checkpoint"))
            last_checkpoint = run.elapsed()
    run.guarded("export", lambda: run.export("smollm2-draft.Q4_1"))
    run.log(
        f"done: {run.written_tokens:,} tokens written in {run.writing_seconds:.0f} s, "
        f"{run.learner.num_tokens:,} learnt in {run.learner.num_steps} steps",
        written=run.written_tokens,
        learnt=run.learner.num_tokens,
    )


if __name__ == "__main__":
    main()
