"""scripts/fuzz.py: it notices every kind of failure, repeats itself, and finds none in a slice."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_files import load_script  # makes the fuzzer's modules importable

from fuzz_plants import PLANTS  # isort: skip
from fuzzing import grammar, mutate, pickles, pool  # isort: skip
from fuzzing.cases import draws_of  # isort: skip

FUZZ = load_script("fuzz")
needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory and time are read from Linux's /proc"
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pool.Worker]:
    pool.start_server()
    folder = tmp_path_factory.mktemp("plants")
    worker = pool.Worker("fuzz_plants:FORMATS", "fuzz_plants:entrance", folder, folder)
    yield worker
    worker.stop()


@needs_linux
@pytest.mark.parametrize("name", PLANTS)
def test_every_kind_of_failure_is_noticed(
    name: str, planted: pool.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All but the loop may take as long as a busy machine needs
    monkeypatch.setattr(pool, "SECONDS", 0.5 if name == "loop" else math.inf)
    outcome = planted.run(name, 0)
    assert (outcome.kind, bool(outcome.detail)) == (PLANTS[name][0], outcome.kind != "accepted")
    kept = planted.folder / f"{name}-0"
    assert kept.is_dir() == (outcome.kind in pool.FAILURES)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "seeds"  # made by the first that needs them


@needs_linux
def test_a_slice_of_inputs_is_read_rightly_or_refused(
    seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = FUZZ.main(["--inputs", "500", "--quick", f"--out={out}", f"--seeds={seeds}"])
    table = capsys.readouterr().out
    failures = out / "failures.jsonl"
    assert not failures.exists(), failures.read_text()
    assert status == 0
    columns = [cell.strip() for cell in table.splitlines()[-1].split("|")]
    assert columns[1:3] == ["all", "500"]
    assert int(columns[3]) > 50 and int(columns[4]) > 250  # neither all accepted nor all refused


@needs_linux
def test_one_input_can_be_run_again(
    seeds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are the same byte for byte, and stay."""
    contents = []
    for out in (tmp_path / "a", tmp_path / "b"):
        assert FUZZ.main(["--case=ase-extxyz:3", f"--out={out}", f"--seeds={seeds}"]) == 0
        contents.append((out / "ase-extxyz-3" / "input.extxyz").read_bytes())
        (line,) = (out / "failures.jsonl").read_text().splitlines()
        assert json.loads(line)["case"] == "ase-extxyz:3"
    assert contents[0] == contents[1]


@pytest.mark.parametrize("quick", [False, True])
def test_shares_add_up_and_every_format_has_its_inputs(quick: bool) -> None:
    cases = FUZZ.inputs(FUZZ.FORMATS, 2000, quick)
    counts = Counter(name for name, _ in cases)
    assert len(cases) == len(set(cases)) == 2000
    assert set(counts) == set(FUZZ.FORMATS)
    for name, count in counts.items():
        assert {index for each, index in cases if each == name} == set(range(count))


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutations_change_any_content(mutation: object) -> None:
    for content in (b"x", bytes(range(256)) * 4):
        draw = draws_of(0, "x", len(content))
        changed = {mutation(draw, content) for _ in range(30)}  # type: ignore[operator]
        assert changed - {content}


def test_damage_never_leaves_the_content_as_it_is() -> None:
    for index in range(300):
        draw = draws_of(0, "damage", index)
        content = b"a" * draw.randrange(1, 40)
        assert mutate.damage(draw, content)[0] != content


def test_draws_depend_on_the_seed_the_format_and_the_number() -> None:
    draws = {
        draws_of(*key).random() for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    }
    assert len(draws) == 4 and draws_of(0, "a", 0).random() in draws


def test_pickles_are_split_at_their_opcodes() -> None:
    content = b"\x80\x03}q\x00X\x01\x00\x00\x00aK\x01s."
    assert pickles.split(content) == [
        b"\x80\x03", b"}", b"q\x00", b"X\x01\x00\x00\x00a", b"K\x01", b"s", b"."
    ]  # fmt: skip
    assert b"".join(pickles.split(content[:6] + b"\xff\xff")) == content[:6] + b"\xff\xff"


def test_headers_of_tensors_are_joined_as_they_were_split() -> None:
    header = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
    content = grammar.join_tensors(header, b"\x01\x02")
    assert grammar.split_tensors(content) == (header, b"\x01\x02")
