"""Model cards: purpose, results and options of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from molflt.pretrained.trained import Trained

__all__ = ["card"]

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


def card(
    name: str, title: str, trained: Trained, license: str | None, datasets: Sequence[str]
) -> str:
    """Returns the README.md of a model.

    Args:
        name: name of the folder or repository.
        title: one line about the model.
        trained: the model and the information about it.
        license: short name of the license, as on the Hub.
        datasets: training data sets on the Hub.
    """
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
