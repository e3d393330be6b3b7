"""The mixin of huggingface_hub where it is installed, and otherwise what works without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

__all__ = ["ModelHubMixin"]

_MISSING = (
    "{}: needs the package huggingface_hub; got none; run: pip install molflt[hub], or use a folder"
)


class _Folders:
    """Folders alone, by the names of `huggingface_hub.ModelHubMixin`."""

    def save_pretrained(self, save_directory, **_):  # type: ignore[no-untyped-def]
        self._save_pretrained(Path(save_directory))  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **options):  # type: ignore[no-untyped-def]
        name = str(pretrained_model_name_or_path)
        if not Path(name).exists():
            raise ModuleNotFoundError(_MISSING.format(name))
        return cls._from_pretrained(model_id=name, **options)  # type: ignore[attr-defined]

    def push_to_hub(self, repo_id, **_):  # type: ignore[no-untyped-def]
        raise ModuleNotFoundError(_MISSING.format(repo_id))


if TYPE_CHECKING:
    from huggingface_hub import ModelHubMixin
else:
    try:
        from huggingface_hub import ModelHubMixin
    except ImportError:
        ModelHubMixin = _Folders
