"""What the teacher is asked: its own conversations, and texts that Python packages ship.

No prompt of the benchmark is used. Everything follows from a seed and the files of this machine.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
KINDS: Final = ("conversation", "task", "summary", "code edit", "continuation")

_CHARACTERS: Final = (
    "a fisherman", "an old teacher", "a young pilot", "two sisters", "a robot", "a lost cat",
    "a gardener", "a king without a crown", "a violin maker", "a postman", "a scientist",
    "a shy dragon", "a mother and her son", "a painter", "a night watchman", "a sailor",
    "a boy named Tom", "a doctor in a small town", "a fox", "three brothers", "a librarian",
    "a clockmaker", "an astronaut", "a farmer", "a cook", "a tailor", "a detective", "a princess",
)  # fmt: skip
_EVENTS: Final = (
    "who finds a hidden door", "who loses everything in a storm", "on a journey across the desert",
    "who must learn to trust again", "in a city under the sea", "who discovers an old map",
    "who wants to see the ocean", "and a mysterious box", "during the longest night of the year",
    "who saves a village", "who cannot sleep", "and the last tree in the forest",
    "who gets a strange phone call", "who moves to another country", "and a broken bridge",
    "in a world without music", "who learns to fly", "who hears a voice in the wind",
)  # fmt: skip
_TOPICS: Final = (
    "photosynthesis", "the water cycle", "gravity", "the French Revolution", "machine learning",
    "healthy breakfasts", "the history of bread", "volcanoes", "how computers work", "recycling",
    "the human heart", "solar energy", "the Roman Empire", "bees", "time management", "the moon",
    "learning a language", "renewable energy", "public speaking", "the Industrial Revolution",
    "electric cars", "databases", "vaccines", "climate change", "chess", "the ocean", "jazz music",
    "black holes", "sleep", "gardening", "the internet", "democracy", "inflation", "Python lists",
    "whales", "the printing press", "earthquakes", "budgeting", "meditation", "football", "DNA",
    "dinosaurs", "ancient Egypt", "robots", "travelling by train", "writing a letter", "coffee",
)  # fmt: skip
_TASKS: Final = (
    "Explain {t} to a beginner.", "What is {t}?", "Write a short essay about {t}.",
    "Give me five facts about {t}.", "Why is {t} important?", "Write a blog post about {t}.",
    "List the advantages and disadvantages of {t}.", "How would you teach {t} to children?",
    "Describe {t} in detail.", "Give me some tips about {t}.", "Write a poem about {t}.",
    "Write a dialogue between two people about {t}.", "What should everyone know about {t}?",
)  # fmt: skip
_STORIES: Final = (
    "Write a story about {s}.", "Tell me a story about {s}.", "Write a long tale about {s}.",
    "Write a short story about {s}.", "Can you write a story about {s}?", "Write a fable of {s}.",
)  # fmt: skip
_SUMMARIES: Final = (
    "Summarize the following text:\n\n{p}", "Give a short summary of this passage:\n\n{p}",
    "What are the main points of this text?\n\n{p}", "Sum up this text briefly:\n\n{p}",
    "{p}\n\nSummarize the text above.", "Please summarize this in a few sentences:\n\n{p}",
    "Write a summary of the text below, keeping the facts.\n\n{p}",
    "Rewrite this text in simpler words:\n\n{p}",
)  # fmt: skip
_NAMES: Final = (
    "result", "item", "entry", "source", "target", "buffer", "node", "count", "total", "options",
    "handler", "content", "label", "element", "config", "payload", "token", "position", "current",
    "folder", "message", "key_name", "first", "limit", "context", "data", "obj", "output", "record",
)  # fmt: skip
_MIN_CODE_LINES, _MAX_CODE_LINES = 6, 40
_MIN_WORDS, _MAX_WORDS = 50, 190


class Encoder(Protocol):
    """Turns texts into token ids; control tokens written out in them count as such."""

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to be written on by the teacher."""

    kind: str  # one of KINDS
    tokens: tuple[int, ...]
    starts_in_user_turn: bool  # what the teacher writes first is a question, not an answer
    temperature: float  # of answers; 0 is greedy


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of Python and the names in it."""

    code: str
    names: tuple[str, ...]
    function: str


def packaged_code(rng: random.Random, max_files: int) -> list[Snippet]:
    """Return functions and classes of the standard library, in random order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py"))
    files += sorted(path for path in folder.glob("*/*.py") if "test" not in str(path.parent))
    files = [path for path in files if "site-packages" not in path.parts]
    snippets: list[Snippet] = []
    for path in rng.sample(files, min(max_files, len(files))):
        try:
            source = path.read_text("utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        snippets += _functions(source.splitlines(), tree)
    rng.shuffle(snippets)
    return snippets


def _functions(lines: Sequence[str], tree: ast.AST) -> Iterator[Snippet]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if not _MIN_CODE_LINES <= length <= _MAX_CODE_LINES:
            continue
        found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        names = tuple(sorted(name for name in found - {"self", "cls"} if len(name) > 2))
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if names and len(code) < 1600:
            yield Snippet(code, names, node.name)


def packaged_prose(rng: random.Random, max_files: int) -> list[str]:
    """Return passages from Python's own topics and the descriptions that packages ship."""
    texts: list[str] = []
    try:
        from pydoc_data.topics import topics

        texts += topics.values()
    except ImportError:
        pass
    site = Path(sysconfig.get_paths()["purelib"])
    files = sorted(site.glob("*.dist-info/METADATA"))
    for path in rng.sample(files, min(max_files, len(files))):
        text = path.read_text("utf-8", errors="ignore")
        texts.append(text.partition("\n\n")[2])
    passages = [passage for text in texts for passage in _passages(text)]
    passages = list(dict.fromkeys(passages))
    rng.shuffle(passages)
    return passages


def _passages(text: str) -> Iterator[str]:
    """Join neighbouring paragraphs of prose until they are long enough."""
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        letters = sum(each.isalpha() or each == " " for each in plain)
        if len(plain) < 60 or letters < 0.85 * len(plain):
            continue
        words += plain.split()
        if len(words) >= _MIN_WORDS:
            yield " ".join(words[:_MAX_WORDS])
            words = []


class Prompts:
    """Draws rows of every kind; two objects of one seed and one machine draw the same."""

    def __init__(self, encode: Encoder, seed: int, *, max_files: int = 400) -> None:
        """Read what this machine's packages ship; a twentieth of it is held out."""
        self._encode = encode
        self._rng = random.Random(seed)
        code, prose = packaged_code(self._rng, max_files), packaged_prose(self._rng, max_files)
        self._code = {True: code[: len(code) // 20], False: code[len(code) // 20 :]}
        self._prose = {True: prose[: len(prose) // 20], False: prose[len(prose) // 20 :]}
        self._written: list[str] = []  # passages by the teacher, for summaries

    def sizes(self) -> dict[str, int]:
        """Return how much there is to draw from."""
        return {"code": len(self._code[False]), "prose": len(self._prose[False])}

    def add_written(self, passages: Sequence[str]) -> None:
        """Give texts of the teacher's own, to be summarised later; the newest are kept."""
        self._written = [*self._written, *passages][-20000:]

    def rows(self, kind: str, count: int, *, held_out: bool = False) -> list[Row]:
        """Return that many rows of a kind."""
        drawn = [self._draw(kind, held_out) for _ in range(count)]
        ids = self._encode([text for text, _ in drawn])
        own = kind == "conversation"
        return [
            Row(kind, tuple(tokens), own, temperature)
            for tokens, (_, temperature) in zip(ids, drawn, strict=True)
        ]

    def _draw(self, kind: str, held_out: bool) -> tuple[str, float]:
        """Return a row's text so far and the temperature of its answers."""
        rng = self._rng
        temperature = 0.0 if rng.random() < 0.5 else rng.uniform(0.6, 1.0)
        match kind:
            case "conversation":
                text = self._chat(None)
            case "task" if rng.random() < 0.5:
                story = f"{rng.choice(_CHARACTERS)} {rng.choice(_EVENTS)}"
                text = self._chat(rng.choice(_STORIES).format(s=story))
            case "task":
                text = self._chat(rng.choice(_TASKS).format(t=rng.choice(_TOPICS)))
            case "summary":
                pool = self._prose[held_out]
                if self._written and (not pool or rng.random() < 0.6):
                    pool = self._written
                text = self._chat(rng.choice(_SUMMARIES).format(p=rng.choice(pool)))
            case "code edit":
                text = self._edit(rng.choice(self._code[held_out]))
            case "continuation" if rng.random() < 0.5:
                code = rng.choice(self._code[held_out]).code
                text = code[: rng.randint(len(code) // 4, len(code) // 2)]
            case "continuation":
                text = rng.choice(self._prose[held_out])[: rng.randint(80, 400)]
            case _:
                raise ValueError(f"[prompts] kind must be one of {KINDS}, got {kind!r}")
        return text, temperature

    def _chat(self, words: str | None) -> str:
        """Return a conversation up to the answer, or without words up to the question."""
        system = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n" if self._rng.random() < 0.9 else ""
        if words is None:
            return f"{system}<|im_start|>user\n"
        return f"{system}<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"

    def _edit(self, snippet: Snippet) -> str:
        rng = self._rng
        name, other = rng.choice(snippet.names), rng.choice(_NAMES)
        order = rng.choice((
            f"Rename the variable {name} to {other}", f"Rename {name} to {other}",
            f"Use the name {other} instead of {name}", f"Add comments to {snippet.function}",
            f"Add a docstring to {snippet.function}", f"Add type hints to {snippet.function}",
            f"Rename {snippet.function} to {other}_{snippet.function}",
        ))  # fmt: skip
        fenced = f"```python\n{snippet.code}\n```"
        if rng.random() < 0.3:
            return self._chat(f"{order} in this code:\n\n{fenced}") + "```python\n"
        return f"{fenced}\n\n{order}:\n\n```python\n"
