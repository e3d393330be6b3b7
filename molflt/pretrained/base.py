"""The base class of trained models: export to a folder or to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from molflt.files import shown, write_atomically
from molflt.pretrained.card import card
from molflt.pretrained.trained import Trained, read_trained
from molflt.training.exported import check_replaceable, write_exported
from molflt.training.sources import HUB
from molflt.version import __version__

__all__ = ["Pretrained"]

_LONGEST = 500  # characters of `about`
_MISSING = (
    "{}: needs the package huggingface_hub; got none; run: pip install molflt[hub], or use a folder"
)


class _Folders:
    """Replacement of `huggingface_hub.ModelHubMixin` that only supports folders."""

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
    from huggingface_hub import ModelCard, ModelHubMixin
else:
    try:
        from huggingface_hub import ModelHubMixin
    except ImportError:
        ModelHubMixin = _Folders


class Pretrained(ModelHubMixin):
    """A trained model with its training options and results.

    `molflt.load` returns one. `save_pretrained(folder)` writes model.safetensors (weights and
    options), config.json (the options again) and README.md (a model card);
    `from_pretrained(folder or OWNER/NAME)` reads them, and `push_to_hub("OWNER/NAME")` uploads
    them, as in every library with `huggingface_hub.ModelHubMixin`.

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
        super().__init__()
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

    def _card(self, name: str) -> str:
        title = self.summary.removeprefix(f"{self.name}: ")
        return card(name, title, self.trained, self.license, self.datasets)

    def _save_pretrained(self, save_directory: Path) -> None:
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
        folder = Path(save_directory)
        write_exported(folder, self.model.state_dict(), content)
        write_atomically(folder / "README.md", self._card(folder.name).encode())

    def generate_model_card(self, *args: object, **kwargs: object) -> ModelCard:
        """Returns the model card that is written as README.md."""
        from huggingface_hub import ModelCard

        return ModelCard(self._card(self.name))

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: object) -> Self:
        device = str(options.pop("device", "cpu"))
        source = model_id if Path(model_id).exists() else f"{HUB}{model_id}"
        trained = read_trained(source, device=device, hub=options)
        if not isinstance(trained.model, cls.models):
            raise ValueError(
                f"{model_id}: expected a model for {cls.__name__}; got one of recipe "
                f"{shown(trained.recipe)}; molflt.load reads any model"
            )
        return cls(trained)

    if TYPE_CHECKING:  # the same signature with and without huggingface_hub

        @classmethod
        def from_pretrained(
            cls, pretrained_model_name_or_path: str | Path, **options: Any
        ) -> Self: ...

    else:

        def save_pretrained(self, save_directory, **options):
            check_replaceable(Path(save_directory))  # before the mixin removes a config.json
            return super().save_pretrained(save_directory, **options)

        @classmethod
        def from_pretrained(cls, pretrained_model_name_or_path, **options):
            with _one_line(pretrained_model_name_or_path):
                return super().from_pretrained(pretrained_model_name_or_path, **options)

        def push_to_hub(self, repo_id, **options):
            with _one_line(repo_id):
                return super().push_to_hub(repo_id, **options)


@contextmanager
def _one_line(name: object) -> Iterator[None]:
    """Turns errors of the Hub into a ValueError of one line."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("huggingface_hub", "httpx", "httpcore"):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{HUB}{name}: error of the Hugging Face Hub, {type(error).__name__}: {reason}; check "
            "the name, the network and the login (hf auth login)"
        ) from None
