"""Draw ListOps expressions (arXiv:1804.06028), as in Long Range Arena (arXiv:2011.04006).

python scripts/listops.py datasets/lra/ListOps
"""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt
from kit.words import guarded

from molflt.data.text.vocabulary import LISTOPS
from molflt.files import atomically

END = "]"
OPERATORS = LISTOPS[: LISTOPS.index(END)]
DIGITS = LISTOPS[LISTOPS.index(END) + 1 :]

_OPERATOR_SHARE = 0.25  # fraction of arguments that are lists
_MOST_MISSES = 1_000_000

# For an even number of arguments, the median is the mean of the middle two, rounded down.
VALUES: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda arguments: int(statistics.median(arguments)),
    "[SM": lambda arguments: sum(arguments) % 10,
}


def expressions(
    draw: random.Random, depth: int, arguments: int, min_length: int, max_length: int
) -> Iterator[tuple[str, int]]:
    """Yields distinct random expressions and their values.

    With probability 3/4, and always at the maximum depth, an argument is a digit. Otherwise, it is
    a list of 2 to `arguments` arguments. Expressions that exceed the limits of `make` are rejected.
    """
    known: set[int] = set()
    misses = 0
    while misses < _MOST_MISSES:
        tokens: list[str] = []
        value = _grow(draw, depth, arguments, max_length, tokens)
        misses += 1
        if min_length < len(tokens) < max_length:
            text = " ".join(tokens)
            # The texts of the full data set would occupy 300 MB.
            if hash(text) not in known:
                known.add(hash(text))
                misses = 0
                yield text, value
    raise ValueError(f"found only {len(known):,} distinct expressions; change the limits")


def _grow(
    draw: random.Random, depth: int, arguments: int, max_length: int, tokens: list[str]
) -> int:
    """Appends the tokens of a random expression to `tokens` and returns its value."""
    # Expressions that are too long will be rejected and are therefore ended early.
    if depth <= 1 or len(tokens) >= max_length or draw.random() >= _OPERATOR_SHARE:
        digit = draw.randrange(10)
        tokens.append(DIGITS[digit])
        return digit
    operator = draw.choice(OPERATORS)
    tokens.append(operator)
    count = draw.randint(2, arguments)
    values = [_grow(draw, depth - 1, arguments, max_length, tokens) for _ in range(count)]
    tokens.append(END)
    return VALUES[operator](values)


def make(
    dst: Path,
    train: PositiveInt = 96000,
    val: PositiveInt = 2000,
    test: PositiveInt = 2000,
    depth: PositiveInt = 10,
    arguments: int = 10,
    min_length: int = 500,
    max_length: int = 2000,
    seed: int = 0,
) -> None:
    """Draw ListOps expressions, by default as many and as long as in Long Range Arena.

    Writes train.tsv, val.tsv and test.tsv with the columns Source and Target. All expressions are
    distinct.

    Args:
        dst: folder for the files, such as datasets/lra/ListOps; existing files are replaced.
        train: number of expressions for training.
        val: number of expressions for validation.
        test: number of expressions for testing.
        depth: depth of the trees, whose digits are the last level; lists have depth - 1 levels.
        arguments: maximum number of arguments of an operator.
        min_length: exclusive lower bound of the number of tokens in an expression.
        max_length: exclusive upper bound of the number of tokens in an expression.
        seed: seed of the random numbers.
    """
    drawn = expressions(random.Random(seed), depth, arguments, min_length, max_length)
    lines = []
    with ExitStack() as stack:  # writes either all files or no file
        for use, count in {"train": train, "val": val, "test": test}.items():
            part = stack.enter_context(atomically(Path(dst) / f"{use}.tsv"))
            tokens = 0
            with open(part, "w") as file:
                file.write("Source\tTarget\n")
                for _ in range(count):
                    text, value = next(drawn)
                    file.write(f"{text}\t{value}\n")
                    tokens += text.count(" ") + 1
            lines.append(f"  {use}: {count:,} expressions, {tokens / count:.1f} tokens on average")
    print("\n".join([f"{dst}: ListOps", *lines]))


@guarded
def main(words: list[str] | None = None) -> None:
    auto_cli(make, args=words)


if __name__ == "__main__":
    raise SystemExit(main())
