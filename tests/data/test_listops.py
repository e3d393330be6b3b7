"""ListOps: published values, random expressions, and their tokens."""

import itertools
import random
import re
from collections import Counter
from pathlib import Path
from statistics import median

import listops
import numpy as np
import pytest
from listops import OPERATORS, expressions
from scipy.stats import chisquare, ks_2samp

from molflt.data.text.glue import find_split, read_examples
from molflt.data.text.sentences import SentenceData
from molflt.data.text.tokenized import TokenizedText
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import LISTOPS as SYMBOLS

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "listops"
PUBLISHED = SHARED / "test_d20s.tsv.xz"
TWO = "[SM [MED 3 1 8 4 ] [MIN 7 9 ] [MAX 2 5 4 ] ]"  # 3 (the mean of 3 and 4, down) + 7 + 5


def evaluate(expression: str) -> int:
    """The value of an expression, from the innermost lists outwards."""
    rules = {"MIN": min, "MAX": max, "SM": lambda x: sum(x) % 10, "MED": lambda x: int(median(x))}

    def value(found: re.Match) -> str:
        return str(rules[found[1]](list(map(int, found[2].split()))))

    text, more = re.sub(r"[() ]+", " ", expression), 1
    while more:
        text, more = re.subn(r"\[([A-Z]+) ([\d ]+) \]", value, text)
    return int(text)


def symbols(text: str) -> list[str]:
    return [one for one in text.split() if one not in "()"]


@pytest.fixture(scope="module")
def published() -> list[tuple[list[str], int]]:
    if not PUBLISHED.is_file():
        pytest.skip(f"{PUBLISHED} is missing")
    found = read_examples(PUBLISHED, "ListOps")
    assert [evaluate(one.first) for one in found] == [one.label for one in found]
    return [(symbols(one.first), int(one.label)) for one in found]


def test_all_published_values(published):
    assert len(published) == 10_000
    assert {one for text, _ in published for one in text} == set(SYMBOLS)


def test_random_expressions_are_distributed_as_published(published):
    """Compares lengths, values and symbols."""
    drawn = expressions(random.Random(1), depth=20, arguments=5, min_length=6, max_length=2000)
    mine = [(text.split(), value) for text, value in itertools.islice(drawn, 4000)]
    theirs = [pair for pair in published if len(pair[0]) > 6]  # see configs/lra/README.md
    sizes = [[len(text) for text, _ in some] for some in (mine, theirs)]
    assert ks_2samp(*sizes).pvalue > 0.01
    for what in (lambda text, value: [value], lambda text, value: text):
        counts = [Counter(x for pair in some for x in what(*pair)) for some in (mine, theirs)]
        keys = sorted(set(counts[0]) | set(counts[1]))
        shares = [np.array([count[k] for k in keys]) / count.total() for count in counts]
        assert np.abs(shares[0] - shares[1]).max() < 0.012  # three standard errors of the values


def test_limits_of_random_expressions():
    limits = {"depth": 5, "arguments": 4, "min_length": 8, "max_length": 40}
    some = list(itertools.islice(expressions(random.Random(0), **limits), 3000))
    assert {len(text.split()) for text, _ in some} == set(range(9, 40))
    nested = [text.replace("]", ")").replace("[M", "(").replace("[S", "(") for text, _ in some]
    assert max(depth(text) for text in nested) == 4  # digits are the fifth level
    operators = Counter(x for text, _ in some for x in text.split() if x in OPERATORS)
    assert chisquare([*operators.values()]).pvalue > 0.01
    assert list(itertools.islice(expressions(random.Random(0), **limits), 3000)) == some
    assert len({text for text, _ in some}) == 3000
    assert all(evaluate(text) == value for text, value in some)


def depth(text: str) -> int:
    return max(itertools.accumulate((x == "(") - (x == ")") for x in text))


def test_values_by_hand():
    assert evaluate(TWO) == 5 and evaluate("( ( ( [MAX 2 ) 9 ) ] )") == 9
    assert evaluate("7") == 7 and evaluate("[MED 1 9 8 ]") == 8 and evaluate("[MED 1 2 ]") == 1


def test_files_become_tokens_and_labels(tmp_path):
    words = ["--train=30", "--val=5", "--test=4", "--depth=4", "--arguments=3", "--min_length=4"]
    folder = tmp_path / "ListOps"
    assert listops.main([str(folder), *words, "--max_length=30"]) == 0
    rows = {use: read_examples(find_split(tmp_path, "ListOps", use), "ListOps") for use in FILES}
    assert {use: len(found) for use, found in rows.items()} == FILES
    texts = [one.first for found in rows.values() for one in found]
    assert len(set(texts)) == 39 and all(4 < len(text.split()) < 30 for text in texts)
    assert all(evaluate(one.first) == one.label for found in rows.values() for one in found)
    pytest.importorskip("tokenizers")
    data = SentenceData("ListOps", tmp_path, length=20, batch_size=2)
    assert data.sizes() == {"vocabulary": 20, "classes": 10}
    ids, types, label = data.datasets["val"][0]
    own = [SYMBOLS.index(one) + 5 for one in rows["val"][0].first.split()]
    assert ids.tolist() == [data.tokenizer.cls, *own[:18], data.tokenizer.sep]
    assert not types.any() and label == rows["val"][0].label
    cut = sum(len(one.first.split()) > 18 for one in rows["train"])
    assert cut and data.datasets["train"].cut == cut


FILES = {"train": 30, "val": 5, "test": 4}


def test_each_line_of_a_text_is_an_expression(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer.train("listops", [], 8, True)
    assert (tokenizer.fixed, tokenizer.letters, len(tokenizer)) == ("listops", None, 20)
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.fixed == "listops" and again.decode(again.encode([TWO])[0]) == TWO
    assert again.encode(["3 [MASK]"]) == [[5 + SYMBOLS.index("3"), again.mask]]
    path = tmp_path / "a.txt"
    path.write_text(f"{TWO}\n\n( [MAX 1 2 ] )\n")
    data = TokenizedText(path, path, kind="listops", length=12)
    data.setup()
    middle = again.encode([TWO])[0] + [again.sep] + again.encode(["[MAX 1 2 ]"])[0] + [again.sep]
    assert data.datasets["val"].ids.tolist() == middle
