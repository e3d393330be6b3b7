"""The settings of a made data set, in the folder that holds it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from making.files import _are_counts
from making.processes import _in_processes
from making.references import linear_references, molecule_energies
from making.systems import _SPLITS

from molflt.data.shards import Shard
from molflt.files import shown, write_atomically
from molflt.lock import FolderLock

_SETTINGS = "made.json"
_SIZES = ("train", "val", "large")


def _store_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.safetensors"


@contextlib.contextmanager
def _alone(directory: Path, shard: Shard | None) -> Iterator[None]:
    """Keeps others from making the same in a folder; shards go on side by side.

    Raises:
        ValueError: if another process makes all of it, or this shard; for all, or any shard.
    """
    doing = "is making data in this folder; wait for it, or choose another folder"
    with contextlib.ExitStack() as held:
        whole = FolderLock(directory, doing, shared=shard is not None)
        held.enter_context(whole.held())
        if shard is not None:
            doing = f"is making shard {shard} in this folder; wait for it, or make another shard"
            name = f".lock.{shard.number}-of-{shard.total}"
            held.enter_context(FolderLock(directory, doing, name).held())
        yield


def _claim(directory: Path, settings: dict[str, object]) -> None:
    """Note the settings in the folder; refuse a folder that holds something else."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _SETTINGS
    if not path.exists():
        for split in _SPLITS:
            if _store_path(directory, split).exists():
                raise ValueError(
                    f"{_store_path(directory, split)}: already there, and not made here "
                    f"(no {_SETTINGS} next to it); choose another folder"
                )
        _write_settings(directory, settings)
        return
    found = _read_settings(directory)
    words = ", ".join(
        f"{name} {shown(found.get(name))} (now {settings[name]!r})"
        for name in settings
        if not _goes_on(found.get(name), settings[name], grows=name in _SIZES)
    )
    if words:
        raise ValueError(
            f"{directory}: begun with other settings: {words}; repeat those, or choose another "
            "folder"
        )
    sizes = {name: settings[name] for name in _SIZES if name in settings}
    if any(found.get(name) != size for name, size in sizes.items()):
        _write_settings(directory, found | sizes)


def _goes_on(found: object, asked: object, grows: bool) -> bool:
    """Returns True if a folder can be continued with another setting."""
    if grows and isinstance(found, int | None) and isinstance(asked, int):
        return (found or 0) <= asked
    return found == asked


def _read_settings(directory: Path) -> dict[str, object]:
    path = directory / _SETTINGS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path}: not the settings of scripts/make_data.py; got {path.read_bytes()[:40]!r}; "
            "delete the file, or choose another folder"
        )
    rejected = found.get("rejected", {})
    if not isinstance(rejected, dict) or not all(map(_are_counts, rejected.values())):
        raise ValueError(
            f"{path}: rejected must be numbers by split and reason; got {shown(rejected)}; delete "
            "that key, or choose another folder"
        )
    return found


def _write_settings(directory: Path, settings: dict[str, object]) -> None:
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    write_atomically(directory / _SETTINGS, f"{text}\n".encode())


def _references(directory: Path, calculator: str) -> dict[str, float]:
    """Energy of each element, eV; computed once, then read from the settings."""
    settings = _read_settings(directory)
    molecules = settings.get("molecules_eV")
    if molecules is None:
        with contextlib.closing(_in_processes(molecule_energies, [calculator], 1)) as found:
            molecules = next(found)
        settings |= {"molecules_eV": molecules, "references_eV": linear_references(molecules)}
        _write_settings(directory, settings)
    try:
        references = linear_references({name: float(e) for name, e in molecules.items()})  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{directory / _SETTINGS}: molecules_eV must be energies of H2, H2O, CO and N2; got "
            f"{shown(molecules)}; delete that key, or choose another folder"
        ) from None
    words = ", ".join(f"{element} {energy:.4f}" for element, energy in references.items())
    print(f"references of {calculator}, eV: {words} (from H2, H2O, CO, N2)")
    return references
