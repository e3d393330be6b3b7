"""The base class of trained models: export to a folder or to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from molflt.files import shown, write_atomically
from molflt.pretrained.card import card
from molflt.pretrained.trained import Trained, read_trained
from molflt.training.exported import check_replaceable, write_exported
from molflt.training.sources import HUB
from molflt.version import __version__

__all__ = ["Pretrained"]

_LONGEST = 500  # characters of `about`


class Pretrained:
    """A trained model with its training options and results.

    `molflt.load` returns one. `save_pretrained(folder)` writes model.safetensors (weights and
    options), config.json (the options again) and README.md (a model card);
    `from_pretrained(folder or OWNER/NAME)` reads them, and `push_to_hub("OWNER/NAME")` uploads
    them.

    Args:
        trained: the model and the information about it.

    Attributes:
        models: classes of the modules that it supports.
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
        readme = card(folder.name, title, trained, self.license, self.datasets)
        write_atomically(folder / "README.md", readme.encode())

    def push_to_hub(
        self, repo_id: str, private: bool | None = None, token: str | None = None, **options: Any
    ) -> str:
        """Uploads the model to the Hugging Face Hub, and returns the address of the commit.

        Args:
            repo_id: OWNER/NAME; created if it is missing.
            private: make a new repository private.
            token: token of the Hub; by default that of the login.
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
