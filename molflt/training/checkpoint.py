"""Weights, checkpoints and exported models, which are read without executing code.

An exported model is a safetensors file whose header describes the model and its training as JSON.
config.json is a copy of the header for readers and the Hugging Face Hub.
"""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from molflt.data.structures.domain import DOMAIN, read_domain
from molflt.data.structures.store import STORE
from molflt.files import read_header, save_tensors, shown, verify_tensors, write_atomically
from molflt.optional import require
from molflt.training.config import HUB, Config, read_config
from molflt.training.recipes import Recipe

_WEIGHTS = Path(__file__).parents[1] / "weights"  # packaged models
_MODEL = "model.safetensors"
_KEY, _FORMAT = "molflt", 1  # entry of the header of an exported model


def packaged(name: str) -> Path | None:
    """Returns the weights of a packaged model; None for other names, and if a file is named so."""
    path = _WEIGHTS / name / _MODEL
    return path if path.is_file() and not Path(name).exists() else None


def is_trained(path: Path) -> bool:
    """Returns True if a path looks like a run, an exported model, or weights."""
    if path.suffix == ".safetensors" and path.is_file():
        return read_header(path).get("format") != STORE
    return (path / "config.yaml").is_file() or (path / _MODEL).is_file()


def _fetched(name: str, options: Mapping[str, object]) -> Path:
    repository, _, revision = name.removeprefix(HUB).partition("@")
    files = [_MODEL, "config.json", "tokenizer.json"]  # the last only for published encoders
    arguments = {"revision": revision or None, "allow_patterns": files, **options}
    fetch: Callable[..., str] = require("huggingface_hub", name, "hub").snapshot_download
    try:
        folder = fetch(repository, **arguments)
    except Exception as error:  # network failures can raise any exception
        reason = shown((str(error).strip().splitlines() or [type(error).__name__])[0], 200)
        raise ValueError(
            f"{name}: could not be downloaded from the Hugging Face Hub; expected a network "
            f"connection, or a model in the cache; got {type(error).__name__}: {reason}; check the "
            "name, or pass a folder"
        ) from None
    path = Path(folder) / _MODEL
    if not path.is_file():
        raise FileNotFoundError(
            f"{name}: this repository, or its copy in the cache, does not contain {_MODEL}, which "
            "molflt export writes"
        )
    return path


def find_weights(
    source: str | Path | None,
    checkpoint: str | None = None,
    hub: Mapping[str, object] | None = None,
) -> tuple[Path, Path | None]:
    """Resolves the name of a trained model to a weights file and the folder of its run, if any.

    Args:
        source: the folder of a run, an exported model (its folder or file), weights within a run,
            ``hf:OWNER/NAME``, ``hf:OWNER/NAME@REVISION``, or the name of a packaged model; None
            selects the recommended packaged model.
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        hub: arguments of `huggingface_hub.snapshot_download`.
    """
    if source is None:
        path = _WEIGHTS / "game-net" / _MODEL  # the recommended model
        if not path.is_file():
            raise FileNotFoundError(
                f"this installation does not include weights ({path.parent}); pass a run, an "
                f"exported model or {HUB}OWNER/NAME, as in `molflt predict RUN STRUCTURES`"
            )
    elif str(source).startswith(HUB):
        path = _fetched(str(source), hub or {})
    else:
        path = packaged(str(source)) or Path(source)
        if path.name == "config.yaml":
            path = path.parent
        elif (path / _MODEL).is_file() and not (path / "config.yaml").exists():
            path /= _MODEL
    if (path / "config.yaml").is_file():
        return weights_of(path, checkpoint or "best"), path
    if not path.is_file() or path.suffix != ".safetensors":
        got = "no such file"
        if path.exists():
            got = "a folder without a model" if path.is_dir() else "another file"
        raise FileNotFoundError(
            f"{source}: expected the folder of a training run, an exported model, a .safetensors "
            f"file, {HUB}OWNER/NAME, or a packaged model such as adsorption; got {got}"
        )
    if checkpoint is not None:
        raise ValueError(
            f"{source or path}: checkpoint={checkpoint} requires a training run; got a weights file"
        )
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return path, run if (run / "config.yaml").is_file() else None


def weights_of(run: Path, checkpoint: str) -> Path:
    """Returns the weights file of a run; `checkpoint` is "best", "last" or the path of a file."""
    named = checkpoint in ("best", "last")
    return run / "checkpoints" / f"{checkpoint}.safetensors" if named else Path(checkpoint)


def check_weights(path: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError if weights belong to a different model or are not finite.

    Tensors listed in the model's `added_later` may be missing.
    """
    expected = model.state_dict()
    for name in {*getattr(model, "added_later", ())} - weights.keys():
        del expected[name]
    for name in dict.fromkeys([*expected, *weights]):
        want = tuple(expected[name].shape) if name in expected else "no such key"
        got = tuple(weights[name].shape) if name in weights else "no such key"
        if want != got:
            raise ValueError(
                f"{path}: key {shown(name)}: the model expects {want}; got {got}; the weights "
                "belong to a different configuration or version"
            )
        check_finite(path, name, weights[name])


def check_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Raises ValueError if a tensor of a weights file contains NaN or infinity."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{path}: key {name!r}: expected finite numbers; got NaN or infinity; the weights are "
            "damaged, or the run diverged; use a different checkpoint"
        )


def weights_digest(path: Path) -> str:
    """Returns the SHA-256 digest of a weights file, from its header if possible; "" if missing."""
    if not path.is_file():
        return ""
    return read_header(path).get("sha256") or hashlib.sha256(path.read_bytes()).hexdigest()


class Saved(NamedTuple):
    """Contents of a weights file and of the run or export to which it belongs."""

    path: Path
    run: Path | None  # folder of the run; None for weights outside a run
    recipe: str | None  # None for a file that contains only weights
    options: Sequence[Mapping[str, object]]  # arguments of each model, several for an ensemble
    weights: Sequence[dict[str, Tensor]]  # of each model
    # SHA-256 digests (of a run) or JSON contents (of an export) of the files that describe the
    # training data, by name; None if unknown
    files: Mapping[str, object] | None
    content: Mapping[str, Any]  # config.yaml of the run, or the header by `write_exported`

    @property
    def domain(self) -> object:
        """Content of domain.json; None if the file is missing."""
        if self.run is not None:
            return read_domain(self.run / DOMAIN)
        return self.content.get("files", {}).get(DOMAIN)  # of an export

    def models(self) -> list[nn.Module]:
        """Builds the models in evaluation mode."""
        name = f"{self.path}: key models"
        if self.run is not None:
            name = f"{self.run / 'config.yaml'}: key model"
        models = []
        for options, weights in zip(self.options, self.weights, strict=True):
            with torch.inference_mode(False), torch.device("cpu"):
                model = _build(name, {"recipe": self.recipe, "model": options})
            check_weights(self.path, model, weights)
            model.load_state_dict(weights)
            models.append(model.eval())
        return models


def read_saved(path: Path, run: Path | None = None) -> Saved:
    """Reads a weights file, with what belongs to it in its run or in its header.

    Checks for damage, and that the files of the run have not changed since training.
    """
    config = None if run is None else read_config(run)
    if not path.is_file():
        names = sorted(file.name for file in path.parent.glob("*.safetensors"))
        expected = f"best, last, or the path of weights; found {', '.join(names) or 'none'}"
        raise FileNotFoundError(f"{path}: no such checkpoint; expected {expected}")
    verify_tensors(path)
    weights, header = load_file(path), read_header(path)
    if run is None and _KEY in header:
        content = _parsed(header[_KEY])
        if content.get("format") != _FORMAT:
            raise ValueError(
                f"{path}: expected an exported model of format {_FORMAT}; got "
                f"{shown(content.get('format'))}; export it again, or download it again, using "
                "this version of molflt"
            )
        models, members = content["models"], [weights]
        if len(models) > 1:
            members = [_with_prefix(weights, f"members.{i}.") for i in range(len(models))]
        return Saved(path, None, str(content["recipe"]), models, members, content["files"], content)
    options, files = _parsed(header.get("model", "")), _parsed(header.get("files", ""))
    if run is None or config is None:
        return Saved(path, None, None, [options], [weights], files or None, {})
    for name, digest in files.items():
        file = run / name  # may be missing
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise ValueError(
                f"{file}: has changed since {path.name} was trained; expected sha256 "
                f"{shown(str(digest)[:12])}...; restore the file"
            )
    for name, trained in options.items():
        if name in config["model"] and config["model"][name] != trained:
            raise ValueError(
                f"{run / 'config.yaml'}: model.{name} is {shown(config['model'][name])}, but "
                f"{path.name} was trained with {shown(trained)}; restore the old value"
            )
    return Saved(path, run, config["recipe"], [config["model"]], [weights], files, {**config})


def _with_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the weights whose names begin with a prefix, under names without it."""
    return {k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)}


def _build(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Builds the model of a recipe, in float32 or above; error messages begin with `name`."""
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
        return Recipe.of(config).load("model")(**config["model"])
    except Exception as error:  # options of other versions can raise any exception
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{name}: {reason}") from error
    finally:
        torch.set_default_dtype(dtype)


def _parsed(text: str) -> dict[str, Any]:
    """Parses a JSON object; returns an empty dictionary for any other text."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def load_run(
    run: Path, checkpoint: str = "best", device: str = "cpu", recipe: str | None = None
) -> tuple[nn.Module, Config]:
    """Loads a trained model.

    Args:
        run: folder written by ``molflt train``.
        checkpoint: "best" (by validation), "last", or the path of a safetensors file.
        device: device of the model: cpu, cuda, cuda:N, or auto.
        recipe: the expected recipe; None accepts any recipe.

    Returns:
        The model in evaluation mode, and the configuration of the run.
    """
    run, device = Path(run), device_named(device)
    saved = read_saved(weights_of(run, checkpoint), run)
    config = cast(Config, saved.content)
    if recipe not in (None, config["recipe"]):
        raise ValueError(
            f"{run}: expected a run of recipe {recipe}; got recipe {config['recipe']}; train such "
            f"a model with molflt train --recipe {recipe}"
        )
    (model,) = saved.models()
    return model.to(device), config


def count_parameters(run: Path, config: Config) -> int:
    """Counts the parameters of a run's model without allocating them."""
    with torch.device("meta"):
        model = _build(f"{run / 'config.yaml'}: key model", config)
    return sum(parameter.numel() for parameter in model.parameters())


def device_named(name: str) -> str:
    """Resolves "auto" and raises ValueError if the device is not available."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {name!r}: expected auto, cpu, cuda or cuda:N; {str(error).splitlines()[0]}; "
            "use auto"
        ) from None
    return name


def write_exported(
    folder: Path, weights: Mapping[str, Tensor], content: Mapping[str, object]
) -> None:
    """Writes model.safetensors and config.json to a folder, which is created if it is missing.

    Raises ValueError if this would overwrite anything other than an earlier export. The weights of
    several models have the prefixes "members.0.", "members.1.", and so on. `content` contains the
    header: recipe, models (the options of each model), about, license, datasets, task (its
    options), results, and files (the content of small files in the run folder, by name).
    """
    path, copy = folder / _MODEL, folder / "config.json"
    if not path.is_file() or _KEY not in read_header(path):
        for file in (folder / "config.yaml", path, copy, folder / "README.md"):
            if file.exists():
                raise ValueError(
                    f"{file}: exists and does not belong to an exported model; expected a new "
                    "folder, or an earlier export; choose a different folder"
                )
    text = json.dumps({"format": _FORMAT, **content}, indent=1, ensure_ascii=False)
    copy.unlink(missing_ok=True)  # the copy must never describe different weights
    save_tensors(path, weights, {"format": "pt", _KEY: text})
    write_atomically(copy, text.encode())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of Lightning: tensors and plain values, without executing its content."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint; nothing to resume; start a new run")
    content = io.BytesIO(path.read_bytes())
    try:
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:  # torch does not compare checksums
                if damaged := archive.testzip():
                    raise ValueError(f"checksum of {damaged} differs")
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise any exception
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            reason = f"{code[1]}, which could run code"
        raise ValueError(
            f"{path}: rejected; expected a complete checkpoint of tensors and plain values; got "
            f"{reason}; restore the file, or start a new run"
        ) from error


def model_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the model weights in a checkpoint, or their averages if averaging is enabled."""
    weights = _with_prefix(checkpoint["state_dict"], "model.")
    return {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
