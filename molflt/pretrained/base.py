"""The base class of trained models: export to a folder or to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from torch import nn

from molflt.files import shown, write_atomically
from molflt.pretrained.trained import Trained, read_trained
from molflt.training.exported import check_replaceable, write_exported
from molflt.training.sources import HUB
from molflt.version import __version__

__all__ = ["Pretrained"]

_LONGEST = 500  # characters of `about`
_FIELDS = ["chemistry", "materials-science", "pytorch-geometric"]
# recipe -> tags, metrics, lines of Python
_TAGS = {
    "language": (["text-generation"], ["perplexity"], ['print(model.generate("The"))']),
    "masked_language": (["fill-mask"], ["perplexity"], ['print(model.fill("A [MASK].")[0][0])']),
    "sentences": (["text-classification"], ["accuracy"], ['model.classify(["A text."])[0].name']),
    "translation": (["translation"], ["bleu"], ['print(model.translate(["A text."])[0])']),
    "image_generation": (
        ["unconditional-image-generation"],
        ["bits_per_dim"],
        ["images = model.generate(4)  # (4, channels, side, side) bytes"],
    ),
    "potential": (
        [*_FIELDS, "interatomic-potential", "forces"],
        ["mae"],
        ["atoms.calc = molflt.Calculator(model)  # of ASE: energy, forces, stress"],
    ),
    "images": (["image-classification"], ["accuracy"], ["model.classify(images)[0].name"]),
}
_ATOMS = (
    [*_FIELDS, "adsorption", "IS2RE"],
    ["mae"],
    ['model.predict("structures.extxyz")[0].energy  # eV; also Atoms, lists, PyG batches'],
)

_COMMANDS = {
    "is2re": "predict {} structures.extxyz",
    "potential": "relax structures.extxyz --run {} --out relaxed.extxyz",
}


class Pretrained:
    """A trained model with its training options and results.

    `molflt.load` returns one. `save_pretrained(folder)` writes model.safetensors (weights and
    options), config.json (the options again) and README.md (a model card);
    `from_pretrained(folder or OWNER/NAME)` reads them, and `push_to_hub("OWNER/NAME")` uploads
    them.

    Args:
        trained: the model and the information about it.

    Attributes:
        models: classes of the modules that this class supports.
        trained: the model and the information about it.
        name: name of the run or of the exported folder.
        about: one line about the predicted quantity; for energies also the structures, the
            references and the level of theory; None if unknown.
        license: short name of the license, as on the Hub; None if unknown.
        datasets: training data sets on the Hub.
    """

    models: ClassVar[tuple[type[nn.Module], ...]] = ()

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.name = trained.name
        self.about, self.license = trained.about, trained.license
        self.datasets = list(trained.datasets)

    @property
    def model(self) -> nn.Module:
        """The module in evaluation mode."""
        return self.trained.model

    def use_compiled(self) -> None:
        """Switches to machine code; only `EnergyPredictor` supports this."""
        raise ValueError(
            f"{self.name}: compiled needs a model of energies; got a model of recipe "
            f"{self.trained.recipe}; leave compiled out"
        )

    @property
    def summary(self) -> str:
        """One line about the model and its training data."""
        return f"{self.name}: {self.about or self.trained.recipe}"

    def __repr__(self) -> str:
        unmeasured = self.trained.unmeasured
        return (
            f"{type(self).__name__}({self.summary}{unmeasured and f'; not measured: {unmeasured}'})"
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the model to a folder, which must not contain other files of these names."""
        folder = Path(folder)
        check_replaceable(folder)
        if self.about is not None and (len(self.about) > _LONGEST or not self.about.isprintable()):
            raise ValueError(
                f"about: expected one line of at most {_LONGEST} characters; got "
                f"{shown(self.about)}"
            )
        trained = self.trained
        content = {
            "molflt": __version__,
            "recipe": trained.recipe,
            "about": self.about,
            "license": self.license,
            "datasets": self.datasets,
            "models": list(trained.options),
            "task": trained.task,
            "results": trained.results,
            "files": trained.files,
        }
        write_exported(folder, self.model.state_dict(), content)
        title = self.summary.removeprefix(f"{self.name}: ")
        readme = _card(folder.name, title, trained, self.license, self.datasets)
        write_atomically(folder / "README.md", readme.encode())

    def push_to_hub(
        self, repo_id: str, private: bool | None = None, token: str | None = None, **options: Any
    ) -> str:
        """Uploads the model to the Hugging Face Hub, and returns the address of the commit.

        Args:
            repo_id: OWNER/NAME; created if it is missing.
            private: make a new repository private.
            token: Hub token; by default that of the login.
            options: options of `huggingface_hub.HfApi.upload_folder`, such as commit_message.
        """
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise ModuleNotFoundError(
                f"{repo_id}: needs the package huggingface_hub; got none; run: pip install "
                "molflt[hub], or use a folder"
            ) from None
        hub = HfApi(token=token)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / self.name
            self.save_pretrained(folder)
            try:
                repo_id = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
                return str(hub.upload_folder(repo_id=repo_id, folder_path=folder, **options))
            except Exception as error:  # the network can fail in many ways
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"{HUB}{repo_id}: error of the Hugging Face Hub, {type(error).__name__}: "
                    f"{reason}; check the name, the network and the login (hf auth login)"
                ) from None

    @classmethod
    def from_pretrained(cls, source: str | Path, device: str = "cpu", **options: Any) -> Self:
        """Loads a model.

        Args:
            source: folder of a run or of an exported model, or OWNER/NAME on the Hub.
            device: cpu, cuda, cuda:N, or auto.
            options: options of `huggingface_hub.snapshot_download`, such as revision and token.
        """
        found = source if Path(source).exists() else f"{HUB}{source}"
        trained = read_trained(found, device=device, hub=options)
        if not isinstance(trained.model, cls.models):
            raise ValueError(
                f"{source}: expected a model for {cls.__name__}; got one of recipe "
                f"{shown(trained.recipe)}; molflt.load reads any model"
            )
        return cls(trained)


def _card(
    name: str, title: str, trained: Trained, license: str | None, datasets: Sequence[str]
) -> str:
    """Returns the README.md of a model in a folder or repository `name`."""
    recipe = trained.recipe
    tags, metrics, use = _TAGS.get(recipe, _ATOMS)
    header: dict[str, object] = {"library_name": "molflt", "tags": ["molflt", recipe, *tags]}
    if license:
        header["license"] = license
    if datasets:
        header["datasets"] = list(datasets)
    header["metrics"] = metrics
    lines = ["---", yaml.safe_dump(header, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    lines += [title, ""]
    lines += ["## Use", "", "```python", "import molflt", ""]
    lines += [f'model = molflt.load("{name}")', *use, "```", ""]
    if recipe in _COMMANDS:
        lines += ["```", f"molflt {_COMMANDS[recipe].format(name)}", "```", ""]
    lines += ["`pip install molflt`; the weights contain a checksum and no code.", ""]
    lines += ["## Measured", "", *_table(trained.results), ""]
    lines += ["## Form", "", *_form(trained), ""]
    return "\n".join(lines)


def _table(results: Mapping[str, object]) -> list[str]:
    """Returns the metrics by split as Markdown."""
    rows = {split: row for split, row in results.items() if isinstance(row, dict) and row}
    if not rows:
        return ["No results; run `molflt evaluate RUN` before `molflt export`."]
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [f"| {' | '.join(['split', *keys])} |", f"|{'---|' * (len(keys) + 1)}"]
    for split, row in rows.items():
        cells = [_cell(row.get(key)) for key in keys]
        lines.append(f"| {' | '.join([split, *cells])} |")
    return lines


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _form(trained: Trained) -> list[str]:
    """Returns the number of parameters, and the options of model and training as YAML."""
    count = sum(weight.numel() for weight in trained.model.parameters())
    several = f", an ensemble of {len(trained.options)}" if len(trained.options) > 1 else ""
    shown = {"recipe": trained.recipe, "model": dict(trained.options[0])}
    shown["task"] = dict(trained.task)
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).strip()
    return [f"{count:,} parameters{several}.", "", "```yaml", text, "```"]
