"""Contents of a run folder, and tables and figures for a page about it."""

from __future__ import annotations

import base64
import csv
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from molflt.evaluation.results import RESULTS, given_data
from molflt.evaluation.runs import read_run
from molflt.files import shown, verify_tensors
from molflt.plots.figure import DPI
from molflt.training.run_folder import read_versions

__all__ = ["Page", "Part", "table"]

_LARGEST_PNG = 500_000  # bytes; larger pictures are reduced to a palette
_BUDGET = 2_500_000  # total bytes of all pictures, for a page of at most 3 MB
_EXPECTED = {  # files of a finished run -> result of their absence
    "checkpoints/last.ckpt": "time and data of the training are unknown",
    "checkpoints/best.safetensors": "the best weights are lost, or there was no validation",
    "metrics.csv": "curves are not shown",
    "versions.json": "versions are unknown",
}

Part = Mapping[str, Any] | str  # a table, figure, row of figures, ...; a string is a paragraph


class Page:
    """Contents of a run folder, and pictures until the page would become too large.

    Attributes:
        missing: a line for each missing or damaged part.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = Path(path)
        if not (path / "config.yaml").is_file():
            raise FileNotFoundError(
                f"{path}: expected the folder of a training run, with config.yaml; got "
                f"{'another folder' if path.is_dir() else 'no such folder'}; name the folder of "
                "molflt train --run"
            )
        self.missing: list[str] = []
        self._left = _BUDGET
        self.run = run = read_run(path, path.resolve().name, self.attempt)
        self.recipe = str(run.config["recipe"])
        self.versions: Mapping[str, object] = self.attempt(lambda: read_versions(path), {})
        self.given = self.attempt(lambda: given_data(path), None)
        self.missing += [
            f"{path / name}: missing; {lost}"
            for name, lost in _EXPECTED.items()
            if not (path / name).is_file()
        ]
        if (best := path / "checkpoints" / "best.safetensors").is_file():
            self.attempt(lambda: verify_tensors(best), False)
        most = int(str(run.config["trainer"]["max_steps"]))
        if run.step is not None and run.step < most and "stopped" not in run.own:
            self.missing.append(
                f"{path}: {run.step:,} of {most:,} steps are done; resume with molflt train "
                "--resume"
            )
        if run.unmeasured:
            self.missing.append(f"{run.unmeasured}; not shown; run molflt evaluate RUN")
        elif not (path / RESULTS).is_file():
            self.missing.append(f"{path}: not evaluated; run molflt evaluate RUN")

    def attempt(self, read: Callable[[], Any], otherwise: Any) -> Any:
        """Calls `read`; if it fails, adds the reason to `missing` and returns `otherwise`."""
        try:
            return read()
        except KeyError as error:
            line = f"{self.path}: a table lacks the column {shown(error.args[0])}"
        except (ValueError, OSError, ArithmeticError, csv.Error) as error:
            line = " ".join(str(error).split())
        self.missing += [line] * (line not in self.missing)
        return otherwise

    def drawn(self, text: str, draw: Callable[[Path], object]) -> list[Part]:
        """Draws a figure; `text` describes it in words."""

        def make() -> list[Part]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "picture.png"
                draw(file)
                return self._embedded(file.read_bytes(), text, text)

        found: list[Part] = self.attempt(make, [])
        return found

    def kept(self, name: str, text: str) -> list[Part]:
        """Returns a PNG file of the run as a figure, if it exists."""
        file = self.path / name
        if not file.is_file():
            return []
        found: list[Part]
        found = self.attempt(lambda: self._embedded(file.read_bytes(), str(file), text), [])
        return found

    def _embedded(self, content: bytes, name: str, text: str) -> list[Part]:
        content, width = _png(content, name)
        data = base64.b64encode(content).decode()
        if len(data) > self._left:
            raise ValueError(
                f"{name}: not shown, because the page would become larger than 3 MB; open the file "
                "in the run"
            )
        self._left -= len(data)
        return [{"src": f"data:image/png;base64,{data}", "width": width, "text": text}]


def _png(content: bytes, name: str) -> tuple[bytes, int]:
    """Returns a PNG file, reduced to a palette if it is large, and its width on the page."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            width = round(image.width * 96 / DPI)
            image.load()
            if len(content) <= _LARGEST_PNG:
                return content, width
            buffer = io.BytesIO()
            image.convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
            return buffer.getvalue(), width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{name}: expected a PNG; {shown(str(error), 100)}; evaluate the run again"
        ) from None


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str,
    text_columns: int = 1,
    most: int = 30,
) -> Part:
    """Returns a table of at most `most` rows, with numbers after the first `text_columns`."""
    parts = {"head": head, "rows": rows, "caption": caption}
    return {**parts, "text_columns": text_columns, "most": most}
