import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from molflt.commands import completion
from molflt.commands.cli import COMMANDS
from molflt.commands.schema import config_schema
from molflt.training.limits import LIMITS, outside

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@cache
def validator() -> Draft202012Validator:
    schema = config_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def wrong(config: dict[str, Any]) -> list[str]:
    return [error.message for error in validator().iter_errors(config)]


def test_shipped_configurations_are_valid() -> None:
    assert not [path for path in CONFIGS if wrong(yaml.safe_load(path.read_text()))]


@pytest.mark.parametrize(
    "text",
    [
        "model: {dmi: 3}",
        "model: {dim: wide}",
        "model: {mixing: linaer}",
        "model: {position_options: {num_node: 4}}",
        "model: {position_options: {num_nodes: few}}",
        "model: {dropout: 1.0}",
        "task: {betas: [0.9, 1.0]}",
        "recipe: language\nmodel: {near_field: 5.0}",  # of another recipe
        "resume: runs/mine",
    ],
)
def test_configurations_that_training_refuses_are_invalid(text: str) -> None:
    assert wrong(yaml.safe_load(text))


def test_every_number_has_its_range_on_the_command_line_and_in_the_schema() -> None:
    checked = 0
    for recipe, one in validator().schema["$defs"].items():
        for part in ("model", "data", "task", "trainer"):
            for name, described in one["properties"][part]["properties"].items():
                key = f"{part}.{name}"
                types = str({k: v for k, v in described.items() if k != "description"})
                if "object" in types or not ("number" in types or "integer" in types):
                    continue
                assert key in LIMITS or "array" in types
                if "number" not in types or key not in LIMITS:
                    continue  # an integer has no values close to the ends
                low, high = (float(end) for end in LIMITS[key][1:-1].split(","))
                size = 2 if "prefixItems" in described else 0
                for number in (low - 1e-3, low, (low + high) / 2, high, high + 1e-3 * high):
                    value = [number] * size if size else number
                    found = wrong({"recipe": recipe, part: {name: value}})
                    assert bool(found) == (outside(key, value) is not None), (key, number, found)
                checked += 1
    assert checked > 50


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p molflt | sed 's/.*-F \\([^ ]*\\).*/\\1/') molflt "${!#}" "${COMP_WORDS[$# - 2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab", reason="shtab writes the scripts")
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    path = tmp_path_factory.mktemp("completion") / "molflt"
    path.write_text(completion._script("bash"))
    return path


@pytest.mark.parametrize(
    ("line", "some", "others"),
    [
        ("", {name[0] for name in COMMANDS}, {"inspect"}),
        ("train --model.pos", {"--model.position", "--model.position_options"}, {"--model.dim"}),
        ("train --model.position m", {"multiplicative"}, {"none"}),
        ("train --config atoms/f", {"atoms/flt"}, {"atoms/softmax"}),
        ("evaluate runs/mine --be", {"--beam"}, {"--also+"}),  # an option of translation
    ],
)
def test_bash_completes(script: Path, line, some, others, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").touch()
    words = ["bash", "-c", COMPLETE, "bash", str(script), "molflt", *line.split(" ")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert some <= found and not found & others, done.stderr
