"""Stop strings over a stream of text.

The matcher is an Aho-Corasick automaton (Aho and Corasick, 1975), so a
character costs amortised constant time whatever the number of stop strings, and
what is held back is exactly the longest end of the text that could still become
a stop string.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """One prefix of a stop string."""

    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    # Longest proper suffix of this prefix that is a prefix as well; None at the root.
    fallback: "_Node | None" = None
    # Longest stop string that ends here.
    match: str = ""


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(depth=node.depth + 1))
        node.match = stop
    queue = deque(root.children.values())
    for node in queue:
        node.fallback = root
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            assert node.fallback is not None
            child.fallback = _step(node.fallback, character)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


def _step(node: _Node, character: str) -> _Node:
    while character not in node.children:
        if node.fallback is None:
            return node
        node = node.fallback
    return node.children[character]


class StopMatcher:
    """Finds the first stop string of one stream of text.

    First is the one that is complete earliest; of several complete at the same
    character, the longest. The answer does not depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for `stops`, none of them empty."""
        if not all(stops):
            raise ValueError("[stop_strings] a stop string must not be empty")
        self._node = _build(stops)
        self._has_stops = bool(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is certain to precede any stop string.

        Once `matched` is set the stream is over and further text is dropped.
        """
        if self.matched is not None:
            return ""
        if not self._has_stops:
            return text
        text_so_far = self._held + text
        node = self._node
        for index in range(len(self._held), len(text_so_far)):
            node = _step(node, text_so_far[index])
            if node.match:
                self.matched = node.match
                self._held = ""
                return text_so_far[: index + 1 - len(node.match)]
        self._node = node
        cut = len(text_so_far) - node.depth
        self._held = text_so_far[cut:]
        return text_so_far[:cut]

    def finish(self) -> str:
        """Return what was held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held
