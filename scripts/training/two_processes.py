"""A few steps of `molflt train` in two processes on the CPU, for every shipped configuration.

Distributed training fails if the loss does not depend on a parameter; training in one process does
not. Models and data are small; all other options are those of the files.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml
from kit.rows import Row, Rows, markdown
from PIL import Image

from molflt.commands.train import build_parser

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"only": ("demo",), "steps": 2}
SMALL = ["--model.dim=24", "--model.heads=3", "--model.ffn_dim=16", "--data.batch_size=4"]


def combinations() -> Iterator[tuple[str, ...]]:
    """Combinations of configuration files, the basic one first."""
    below = {"atoms": "demo", "oc20": "oc20/base", "lm": "lm/wikitext2"}
    below |= {"image": "image/fashion-mnist", "masked": "masked/wikitext2"}
    below |= {"pixels": "pixels/fashion-mnist", "optimizers": "optimizers/small"}
    below |= {"population": "optimizers/population"}
    below |= {"translation": "translation/multi30k", "proteins": "proteins/small-causal"}
    configs = ROOT / "configs"
    for path in sorted(configs.rglob("*.yaml")):
        name = path.relative_to(configs).with_suffix("").as_posix()
        content = yaml.safe_load(path.read_text())
        if content.get("recipe") == "sentences":
            continue  # fine-tuning needs another run
        alone = "data" in content
        folder = "population" if "/population-" in name else name.split("/")[0]
        yield (name,) if alone else (below[folder], name)


def write_data(folder: Path) -> dict[str, list[str]]:
    """Writes data for each recipe. Returns the options."""
    words = (ROOT / "docs" / "attention.md").read_text()
    for split in ("train", "val"):
        (folder / f"{split}.txt").write_text(words)
    for name in ("train", "val"):
        for language in ("de", "en"):
            lines = [line for line in words.splitlines() if line.strip()]
            (folder / f"{name}.{language}").write_text("\n".join(lines))
    residues = "ACDEFGHIKLMNPQRSTVWY"
    records = [f">{i}\n{residues[i % 20 :]}{residues * 3}" for i in range(60)]
    (folder / "proteins.fasta").write_text("\n".join(records))
    pixels = np.random.default_rng(0).integers(0, 256, (10, 4, 28, 28), dtype=np.uint8)
    for label, images in enumerate(pixels):
        (folder / "images" / str(label)).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / "images" / str(label) / f"{number}.png")
    text = [f"--data.{split}={folder}/{split}.txt" for split in ("train", "val")]
    clusters = ["--model.adaptive_cutoffs=[20, 60]", "--data.length=32", "--model.max_length=32"]
    fasta = [f"--data.{split}={folder}/proteins.fasta" for split in ("train", "val")]
    parallel = [f"--data.{split}={folder}/{split}" for split in ("train", "val")]
    image = [f"--data.train={folder}/images", "--data.val=null", "--data.val_fraction=0.5"]
    image += ["--data.class_names=null", "--data.image_size=28", "--data.resize=null"]
    classes = ("--data.class_names=null", "--data.resize=null", "--data.image_size=28")
    pixels_of = [*(word for word in image if word not in classes), "--data.image_size=7"]
    return {
        "is2re": [f"--data.root={ROOT / 'datasets' / 'chgnet-sample'}"],
        "language": [*text, "--data.test=null", *clusters],
        "images": [*image, "--model.patch_size=4"],
        "image_generation": pixels_of,
        "learned_optimizer": ["--data.val_problems=8", "--task.burn_in=2", "--task.unroll=3"],
        "population_optimizer": ["--data.val_problems=8"],
        "masked_language": [*text, "--data.test=null", "--data.length=32", "--data.pieces=300"],
        "proteins": [*fasta, "--data.test=null", "--data.length=32", "--model.max_length=32"],
        "translation": [*parallel, "--data.test=null", "--data.pieces=300"],
    }


def train(names: tuple[str, ...], data: dict[str, list[str]], folder: Path, steps: int) -> Row:
    """Trains a combination of files. Returns how the run ended."""
    files = [word for name in names for word in ("--config", f"{ROOT}/configs/{name}.yaml")]
    recipe = yaml.safe_load(Path(files[1]).read_text()).get("recipe", "is2re")
    own = yaml.safe_load(Path(files[-1]).read_text()).get("model", {})
    small = SMALL[-1:] if "memory" in own else SMALL  # it has no heads
    words = [
        *files,
        *small,
        *data["proteins" if names[0].startswith("proteins") else recipe],
        "--run",
        str(folder / "-".join(names).replace("/", "_")),
    ]
    for key in ("max_steps", "val_every", "checkpoint_every"):
        words.append(f"--trainer.{key}={steps}")
    config = build_parser([*words, "--recipe", recipe]).parse_args(words)
    words.append(f"--model.layers={min(2, config.model.layers)}")
    words.append(f"--task.warmup_steps={min(1, config.task.warmup_steps)}")
    words += ["--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.strategy=ddp"]
    start = time.perf_counter()
    command = [sys.executable, "-m", "molflt", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {
        "configuration": " + ".join(names),
        "recipe": recipe,
        "ended": "well" if done.returncode == 0 else f"{done.returncode}: {last[:200]}",
        "seconds": time.perf_counter() - start,
    }


def measure(only: tuple[str, ...] = (), steps: int = 3) -> Rows:
    """Trains every combination of files, or those whose last file is in `only`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        rows = []
        for names in combinations():
            if not only or names[-1] in only:
                rows.append(train(names, data, folder, steps))
                print(f"{rows[-1]['configuration']}: {rows[-1]['ended']}", flush=True)
    return rows


def table(rows: Rows) -> str:
    """Markdown: counts by recipe, and failures."""
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == recipe]
        bad = [row["configuration"] for row in own if row["ended"] != "well"]
        lines.append([recipe, str(len(own)), str(len(own) - len(bad)), ", ".join(bad) or "none"])
    return markdown(["recipe", "configurations", "trained in two processes", "others"], lines)
