import re
import shutil
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from molflt import __version__

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_begins_with_the_version_and_has_each_group_once() -> None:
    heads = re.findall(r"^## (.+)$", CHANGELOG, re.M)
    assert heads[0] == "Unreleased"
    version, date = re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", heads[1]).groups()
    assert version == __version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["date-released"]) == (version, date)
    for section in re.split(r"^## ", CHANGELOG, flags=re.M)[1:]:
        groups = re.findall(r"^### (.+)$", section, re.M)
        known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
        places = [known.index(group) for group in groups]
        assert all(one < other for one, other in pairwise(places)), groups


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_rights_and_call_what_exists(path: Path) -> None:
    """Only the publishing job may do more than read."""
    flow = yaml.safe_load(path.read_text())
    assert flow[True]  # YAML 1.1 reads `on` as True
    assert flow["permissions"] == {"contents": "read"} and flow["concurrency"]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, job in flow["jobs"].items():
        assert job["timeout-minutes"] <= 90
        publishes = (path.stem, name) == ("release", "publish")
        rights = {"id-token", "attestations"} if publishes else set()
        assert set(job.get("permissions", {})) == rights
        for step in job["steps"]:
            assert {"uses", "run"} & step.keys()
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
            command = step.get("run", "")
            assert "${{" not in command  # input from outside must be a variable of the shell
            for called in re.findall(r"\bmake ((?:[a-z]+ ?)+)", command):
                assert set(called.split()) <= targets, command
    if shutil.which("actionlint"):
        subprocess.run(["actionlint", path], check=True)


def test_workflows_test_the_supported_versions() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    matrix = flow["jobs"]["tests"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert matrix["python"][0] == oldest
    (torch,) = [name for name in project["dependencies"] if name.startswith("torch>")]
    least = torch.removeprefix("torch>=")
    assert {row["torch"] for row in matrix["include"]} == {f"torch=={least}.*", f"torch>={least}"}
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==", constraints, re.M)  # the workflow replaces it
