"""Parallel files of a small language, whose sentences are translated word by word, in reverse."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WORDS = {"ein": "one", "Hund": "dog", "Mann": "man", "rot": "red", "und": "and", "sieht": "sees"}


def write_pairs(root: Path, name: str, count: int, seed: int) -> None:
    """ROOT/NAME.de and NAME.en."""
    draw = np.random.default_rng(seed)
    sources, targets = [], []
    for _ in range(count):
        words = [str(word) for word in draw.choice(list(WORDS), int(draw.integers(2, 5)))]
        sources.append(" ".join(words) + ".")
        targets.append(" ".join(WORDS[word] for word in reversed(words)) + ".")
    (root / f"{name}.de").write_text("\n".join(sources) + "\n")
    (root / f"{name}.en").write_text("\n".join(targets) + "\n")
