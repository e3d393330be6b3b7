"""scripts/decoding.py: what it decodes from are states, and its table is what it measured."""

import csv
from pathlib import Path

import pytest
import torch
from script_files import load_script

NAMES = ["softmax", "performer", "rfa-gate-gaussian", "flt-local"]
POSITIONS = (6, 12, 24)
LAYERS, DIM, HEADS, WIDTH = 4, 128, 8, 16


@pytest.fixture(scope="module")
def script():
    return load_script("decoding")


@pytest.fixture(scope="module")
def out(script, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("decoding")
    words = ["--positions", *map(str, POSITIONS), "--mechanisms", *NAMES, "--rounds", "2"]
    assert script.main([*words, "--out", str(folder)]) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def rows(out) -> list[dict[str, str]]:
    with (out / "decoding.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_mechanism_at_every_position(script, out, rows) -> None:
    found = [(row["mechanism"], int(row["position"])) for row in rows]
    assert found == [(name, n) for name in NAMES for n in POSITIONS]
    assert list(rows[0]) == list(script.COLUMNS)
    for row in rows:
        assert all(float(row[column]) > 0 for column in script.COLUMNS[1:])
        assert (int(row["rounds"]), int(row["tokens_per_round"])) == (2, script.TOKENS)
    text = (out / "decoding.md").read_text()
    assert all(f"| {name} |" in text for name in NAMES) and "log-linear, nprf" in text
    assert 10_000 < (out / "decoding.png").stat().st_size < 150_000


def test_bytes_are_those_of_the_states_and_only_softmax_has_more_for_more_tokens(rows) -> None:
    """float32: sums (m, d + 1) and scales (m or 1) per head and layer, or keys and values."""
    expected = {
        "performer": lambda n: 4 + 4 * LAYERS * HEADS * 64 * (WIDTH + 1 + 1),
        "flt-local": lambda n: 4 + 4 * LAYERS * HEADS * 64 * (WIDTH + 1 + 1),
        "rfa-gate-gaussian": lambda n: 4 + 4 * LAYERS * HEADS * (128 * (WIDTH + 1) + 1),
        "softmax": lambda n: 4 * n + 4 * n * LAYERS * 2 * DIM,
    }
    for row in rows:
        wanted = expected[row["mechanism"]](int(row["position"]))
        assert int(row["state_bytes"]) == wanted, row


def test_held_counts_what_a_view_keeps_alive_once(script) -> None:
    whole = torch.zeros(1000)
    assert script.held((3, [whole[:1], (whole[5:7], torch.zeros(2).double())])) == 4000 + 16


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_the_whole_sequence(script, name, monkeypatch) -> None:
    """The next token's probabilities are those of `forward`, however the prompt is cut."""
    monkeypatch.setattr(script, "PIECE", 4)
    model = script.chosen([name], 16)[name].double()
    tokens = torch.randint(1000, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model.logits(model(tokens))
        for n, state in zip(
            (1, 2, 7, 11), script.states(model, tokens, (1, 2, 7, 11)), strict=True
        ):
            assert state.length == n
            found, _ = model.decode(tokens[:, n : n + 1], state)
            torch.testing.assert_close(found[:, 0], whole[:, n], rtol=0, atol=1e-10)


def test_every_mechanism_with_a_state_is_measured(script) -> None:
    models = script.chosen(None, 8)
    without = set(script.mechanisms()) - set(models)
    assert without == {"log-linear", "nprf"} and "wikitext2" not in script.mechanisms()
    assert {"performer", "linear", "cosformer", "trf", "sine-spe", "conv-spe"} <= set(models)
    assert models["flt-local"].position_scale == 1 / 64


def test_ratios_are_paired_and_exponents_are_those_of_ratios(script) -> None:
    """The machine is 10 times slower in the second round, and time grows as n^2 from 10 on."""
    factors = {10: 1.0, 20: 4.0, 40: 16.0}
    times = {
        (name, n): [[slow * cost * f, slow * cost * f * 1.5, slow * cost * f] for slow in (1, 10)]
        for name, cost in (("softmax", 3.0), ("linear", 1.0))
        for n, f in factors.items()
    }
    result = script.Result(times, dict.fromkeys(times, 2048))
    assert result.ratio(("linear", 40), ("linear", 10)) == pytest.approx(16)
    assert result.growth("linear") == pytest.approx(2)
    assert result.seconds(("linear", 10)) == pytest.approx((1.5 + 10) / 2)
    line = script.table(result).splitlines()[3]
    assert line == "| linear | 5750.0 | 4.00 | 16.00 | 2.00 | 3.00 | 2 | 2 |"
    row = script.rows(result)[-1]
    assert (row["ratio"], row["softmax_ratio"]) == ("16", "3")


def test_no_round_begins_after_the_limit_but_the_first(script) -> None:
    clock = iter(range(0, 10_000, 7))
    result = script.measure(["linear"], [3], rounds=9, limit=15.0, now=lambda: next(clock))
    assert len(result.times["linear", 3]) == 3  # begun at 0, asked at 7, 14 and 21
    result = script.measure(["linear"], [3], rounds=2, limit=0.0)
    assert len(result.times["linear", 3]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mechanisms", "flash"], "mechanism 'flash' is unknown; expected some of conv-spe"),
        (["--mechanisms", "nprf"], "'nprf' leaves no state to decode from; leave it out"),
        (["--positions", "10", "5"], "positions must increase, from 1 on; got 10 5; sort them"),
        (["--positions", "0", "5"], "positions must increase, from 1 on; got 0 5; sort them"),
        (["--rounds", "0"], "rounds must be at least 1; got 0"),
    ],
)
def test_errors_are_one_line(script, words, message, capsys, tmp_path) -> None:
    assert script.main([*words, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("decoding.py: error: ")
    assert message in captured.err
    assert not captured.out and not (tmp_path / "out").exists()
