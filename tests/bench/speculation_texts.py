"""Prompts by kind of text: what is copied, what is partly copied, and what is new."""

from __future__ import annotations

from typing import Final

_CODE: Final = '''def read_table(path, separator=",", has_header=True):
    """Read a table from a text file and return its rows."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            line = line.rstrip("\\n")
            if not line:
                continue
            if number == 0 and has_header:
                header = line.split(separator)
                continue
            values = line.split(separator)
            if has_header and len(values) != len(header):
                raise ValueError(f"line {number} has {len(values)} values")
            rows.append(values)
    return rows


def write_table(path, rows, separator=","):
    """Write rows to a text file."""
    with open(path, "w", encoding="utf-8") as file:
        for values in rows:
            file.write(separator.join(values) + "\\n")
'''
_EDITS: Final = (
    "Rename the argument separator to delimiter", "Rename the variable rows to records",
    "Rename the argument path to filename", "Rename the variable values to cells",
    "Rename the variable number to index", "Rename the variable line to text",
    "Change the encoding to latin-1", "Rename the argument has_header to with_header",
)  # fmt: skip
_ARTICLES: Final = (
    "The harbour of the town was built in 1820, when ships brought grain from the south. Its two "
    "stone piers are four hundred metres long. A lighthouse stands at the end of the northern "
    "pier, and its lamp can be seen from thirty kilometres away. In 1911 a storm broke the "
    "southern pier in three places. It was mended in two years, with granite from the hills "
    "behind the town. Today the harbour has room for sixty fishing boats, and a ferry leaves for "
    "the islands three times a day.",
    "Rye bread needs a sour dough, because rye flour has little gluten. The baker mixes flour and "
    "water and leaves them in a warm place for five days, feeding them each morning. The dough is "
    "wet and sticky and is not kneaded for long. It rises for four hours in a tin and bakes for "
    "an hour in an oven that is hot at first and cooler later. A loaf of rye bread keeps for a "
    "week, and many people think that it tastes best on the third day.",
    "The mountain railway climbs eleven hundred metres in nine kilometres. A toothed rail lies "
    "between the two others, and a wheel under the engine grips it. The first engines burned "
    "coal and needed an hour and a half for the way up. Electric ones have run since 1937, and "
    "they need thirty-five minutes. In winter a plough goes ahead of the first train. At the top "
    "station there is a hut with beds for forty people, and a path leads on to the summit.",
    "Otters live along slow rivers with old trees on their banks. They hunt at night, mostly for "
    "fish, and sleep in dens between the roots of the trees. An otter closes its ears and nose "
    "under water and can stay there for four minutes. The young are born in spring, two or three "
    "at a time, and learn to swim when they are ten weeks old. For many years there were few "
    "otters left, but since the rivers are clean again their number has grown.",
)
_STORIES: Final = (
    "a lighthouse keeper who finds a letter", "a dog that learns to count", "a clock that runs "
    "backwards", "two friends who build a boat", "a baker on a mountain", "a winter without snow",
    "a girl who talks to rivers", "a train that never arrives",
)  # fmt: skip

KINDS: Final = ("code edit", "summary", "story")


def prompt(kind: str, index: int) -> str:
    """Return the words of user `index` for a kind of text; those of an edit need no template."""
    if kind == "code edit":
        edit = _EDITS[index % len(_EDITS)]
        return f"```python\n{_CODE}```\n\n{edit}:\n\n```python\n"
    if kind == "summary":
        article = _ARTICLES[index % len(_ARTICLES)]
        return f"Summarise this text, with its facts, in a few sentences:\n\n{article}"
    if kind == "story":
        return f"Write a long story about {_STORIES[index % len(_STORIES)]}."
    raise ValueError(f"[prompt] kind must be one of {', '.join(KINDS)}, got {kind!r}")
