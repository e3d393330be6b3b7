"""Starting a run from the weights of another: what is taken over, what is not, and its record."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from molflt.data.structures.domain import DOMAIN
from molflt.files import shown
from molflt.training.initial_weights import Origins, read_origins
from molflt.training.run_folder import _RECORD, RunFolder

__all__ = ["Start"]

_MOST = 8  # names in a line; init.json has them all


class _Transfer(NamedTuple):
    """What became of each tensor."""

    loaded: dict[str, Tensor]
    new: dict[str, str]
    """left at its initialization: why"""
    of_data: tuple[str, ...]
    """buffers that the new data decide"""
    left_over: dict[str, Tensor]
    """of the source, with no place here"""


class Start:
    """What a new run starts from: other weights if `init` names some, else nothing.

    Args:
        folder: of the run; one that goes on has weights of its own.
        init: as for `molflt.training.sources.find_weights`.

    Attributes:
        options: of the source's model.
    """

    def __init__(self, folder: RunFolder, init: object) -> None:
        self.folder = folder
        self.name = str(init)
        goes_on = init is None or folder.checkpoint is not None
        self._origins = None if goes_on else read_origins(self.name)
        self.options = {} if self._origins is None else self._origins.options
        self._done: _Transfer | None = None

    def domain(self) -> tuple[str, object] | None:
        """What the source had seen: the name, for messages, and the content of its domain.json.

        None without either. A run that goes on has kept it.
        """
        origins = self._origins
        found = self.folder.remember(None if origins is None else origins.domain)
        name = f"--init {self.name}: {DOMAIN}" if origins else f"{self.folder.last}: initial"
        return None if found is None else (name, found)

    def load(self, model: nn.Module, files: Mapping[str, bytes]) -> None:
        """Loads what fits into a new model; warns if nobody knows what the source had seen.

        Args:
            model: to load into.
            files: of the data, by name.
        """
        if self._origins is not None:
            self._done = _transfer(self._origins, model, files)
            if DOMAIN in files and self._origins.domain is None:
                warnings.warn(
                    f"--init {self.name}: no {DOMAIN} belongs to it: what these weights had seen "
                    "is not known; predictions will be compared with the new data alone",
                    stacklevel=2,
                )

    def files(self, model: nn.Module) -> dict[str, bytes]:
        """The record that the run keeps, by name."""
        if self._origins is None or self._done is None:
            return {}
        return {_RECORD: _record(self.name, self._origins, self._done, model)}

    def say(self, model: nn.Module, options: Mapping[str, object]) -> None:
        """Prints what became of the weights, when the data have decided about their part.

        Args:
            model: of the run.
            options: its options.
        """
        if self._origins is not None and self._done is not None:
            lines = _report(self._origins, self._done, model, options)
            self.folder.say(f"{self.folder.path}: {lines}")


def _transfer(origins: Origins, model: nn.Module, files: Mapping[str, bytes]) -> _Transfer:
    """Loads the tensors that have a name and a shape of the model's, but for what is the data's.

    The model's `of_data` names beginnings of these: a buffer of them, such as the normalizer, is
    never taken over, since it is made of the new data, and parameters of them, such as the logits
    of classes, are taken over if the data come with the same files (vocabulary, classes), or with
    the same one of them if `of_data` has beginnings for each file. All
    other buffers are: the weights were trained with those random features, and what was seen in
    training, such as elements, is joined by what will be, unless the weight that has seen it
    (the model's `seen_by`) is new.

    Args:
        origins: what to load.
        model: to load into.
        files: of the data, by name.
    """
    own, buffers = model.state_dict(), dict(model.named_buffers())
    files_of = _files_of(model)
    decided = tuple(files_of)
    was = origins.files
    others = [n for n in files if was is not None and not _is_same(was.get(n), files[n])]
    loaded, new, of_data = {}, {}, []
    for name, tensor in own.items():
        there = origins.weights.get(name)
        if name.startswith(decided) and name in buffers:
            of_data.append(name)
        elif there is None:
            new[name] = "not in the source"
        elif there.shape != tensor.shape:
            new[name] = f"{tuple(there.shape)} in the source"
        elif other := [
            file
            for start, own in files_of.items()
            if name.startswith(start)
            for file in others
            if own in (None, file)
        ]:
            new[name] = f"of another {other[0]} in the source"
        else:
            loaded[name] = there
    for buffer, weight in getattr(model, "seen_by", {}).items():
        if buffer in loaded and weight not in loaded:
            del loaded[buffer]
            new[buffer] = f"{weight} is new"
    if not any(name not in buffers for name in loaded):
        raise ValueError(
            f"{origins.path}: none of its {len(origins.weights)} tensors has the name and the "
            f"shape of one of this model; got {_listed(list(origins.weights))}; leave the options "
            "of the model out, which are then the source's"
        )
    kept = {name: own[name] for name in of_data}  # a load would fill in what is missing
    model.load_state_dict(kept | loaded, strict=False)
    left = {name: tensor for name, tensor in origins.weights.items() if name not in own}
    return _Transfer(loaded, new, tuple(of_data), left)


def _files_of(model: nn.Module) -> dict[str, str | None]:
    """Beginnings of names of what belongs to the data, and the file that decides; None for any."""
    named = getattr(model, "of_data", ())
    if isinstance(named, Mapping):
        return {start: file for file, starts in named.items() for start in starts}
    return dict.fromkeys(named)


def _is_same(kept: object, content: bytes) -> bool:
    """Whether a file of the data is what the source was trained with."""
    if isinstance(kept, str):
        return kept == hashlib.sha256(content).hexdigest()
    return kept is not None and kept == json.loads(content)


def _record(name: str, origins: Origins, done: _Transfer, model: nn.Module) -> bytes:
    """What init.json says: where the weights come from, and what became of each tensor."""
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    content = {
        "source": name,
        "weights": str(origins.path),
        "sha256": origins.sha256,
        "recipe": origins.recipe,
        "loaded": {key: shapes[key] for key in done.loaded},
        "new": {key: {"shape": shapes[key], "why": why} for key, why in done.new.items()},
        "of_data": list(done.of_data),
        "left_over": {key: list(tensor.shape) for key, tensor in done.left_over.items()},
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _report(
    origins: Origins, done: _Transfer, model: nn.Module, options: Mapping[str, object]
) -> str:
    """Lines about what was loaded, is new, is the data's, and was left over, by name and size.

    Args:
        origins: what was loaded from.
        done: what became of it.
        model: with what the data decide.
        options: of the model.
    """
    own = model.state_dict()
    parts = {name: tensor for name, tensor in own.items() if name in done.loaded}
    lines = [f"starts from {origins.path} (sha256 {origins.sha256[:12]})"]
    lines.append(
        f"loaded     {len(parts)} of {len(own)} tensors, {_numbers(parts.values()):,}"
        f" of {_numbers(own.values()):,} numbers"
    )
    new = [f"{name} {tuple(own[name].shape)}, {why}" for name, why in done.new.items()]
    lines += [f"new        {_listed(new, '; ')}"] if new else []
    frozen = [n for n, p in model.named_parameters() if n in done.new and not p.requires_grad]
    lines += [f"and frozen {_listed(frozen)}: stays random"] if frozen else []
    data = [_of_data(name, own[name], origins.weights.get(name)) for name in done.of_data]
    lines += [f"of data    {'; '.join(data)}"] if data else []
    left = [f"{name} {tuple(tensor.shape)}" for name, tensor in done.left_over.items()]
    lines += [f"left over  {_listed(left)}"] if left else []
    unlike = [
        f"{name} {shown(options[name])}, {shown(was)} in the source"
        for name, was in origins.options.items()
        if name in options and options[name] != was
    ]
    lines += [f"unlike     {_listed(unlike, '; ')}"] if unlike else []
    return "\n  ".join(lines)


def _of_data(name: str, now: Tensor, was: Tensor | None) -> str:
    if was is None or now.shape != was.shape:
        return name
    if now.numel() != 1:
        most = float((now.double() - was.double()).abs().max())
        return f"{name}, up to {most:.3g} from those of the source"
    return f"{name} {float(now):.6g}, {float(was):.6g} in the source"


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return separator.join(names[:_MOST]) + more
