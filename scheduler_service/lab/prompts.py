"""Beginnings of texts whose greedy continuations are compared."""

from typing import Final

TEXTS: Final = (
    "The lighthouse keeper wrote in his diary that the winter storms had begun early, and",
    "To repair a bicycle chain, first turn the bicycle upside down and",
    "The history of tea begins in China, where, according to legend,",
    "A river delta forms when a river reaches the sea and",
    "The first railway in the town was opened in the year when",
    "In chess, the opening is important because",
    "Rye bread is baked in many countries, and each of them",
    "When the night sky is clear in winter, you can see",
)
