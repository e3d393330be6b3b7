"""What all trained models share: export to a folder or to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from molflt.files import shown, write_atomically
from molflt.pretrained.card import card
from molflt.pretrained.hub import ModelHubMixin
from molflt.pretrained.trained import Trained, read_trained
from molflt.training.exported import check_replaceable, write_exported
from molflt.training.sources import HUB
from molflt.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

__all__ = ["Pretrained"]

_LONGEST = 500  # characters of one line about a model


class Pretrained(ModelHubMixin):
    """A trained model, what it was trained on, and how well it did.

    `molflt.load` makes one. `save_pretrained(folder)` writes model.safetensors (weights, options,
    what it was trained on), config.json (a copy of all but the weights) and README.md (a model
    card); `from_pretrained(folder or OWNER/NAME)` reads them, and `push_to_hub("OWNER/NAME")`
    uploads them, as in every library with `huggingface_hub.ModelHubMixin`.

    Args:
        trained: the parts.

    Attributes:
        models: classes of the modules that it is for.
        trained: the parts.
        name: of the run or of the exported folder.
        about: one line that says what is predicted: of energies, of what, against which references,
            at which level of theory; None if nobody has said.
        license: its short name, as on the Hub; None if nobody has said.
        datasets: data sets on the Hub that it was trained on.
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
        """The module itself, in evaluation mode."""
        return self.trained.model

    def use_compiled(self) -> None:
        """Computes with machine code, where there is some: of energies, see `EnergyPredictor`."""
        raise ValueError(
            f"{self.name}: machine code is made of energies; got a model of the recipe "
            f"{self.trained.recipe}; leave compiled out"
        )

    @property
    def summary(self) -> str:
        """One line: what it is, and what it was trained on."""
        return f"{self.name}: {self.about or self.trained.recipe}"

    def __repr__(self) -> str:
        unmeasured = self.trained.unmeasured
        return (
            f"{type(self).__name__}({self.summary}{unmeasured and f'; not measured: {unmeasured}'})"
        )

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
        write_exported(Path(save_directory), self.model.state_dict(), content)
        text = self._card(Path(save_directory).name)
        write_atomically(Path(save_directory) / "README.md", text.encode())

    def generate_model_card(self, *args: object, **kwargs: object) -> ModelCard:
        """The card that is written as README.md."""
        from huggingface_hub import ModelCard

        return ModelCard(self._card(self.name))

    def _card(self, name: str) -> str:
        count = sum(weight.numel() for weight in self.model.parameters())
        summary = self.summary.removeprefix(f"{self.name}: ")
        return card(name, self.trained, summary, count, self.license, self.datasets)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: object) -> Self:
        device = str(options.pop("device", "cpu"))
        source = model_id if Path(model_id).exists() else f"{HUB}{model_id}"
        trained = read_trained(source, device=device, hub=options)
        if not isinstance(trained.model, cls.models):
            raise ValueError(
                f"{model_id}: expected a model for {cls.__name__}; got one of the recipe "
                f"{shown(trained.recipe)}; molflt.load takes any"
            )
        return cls(trained)

    if TYPE_CHECKING:  # also without huggingface_hub, whose signatures these are

        @classmethod
        def from_pretrained(
            cls, pretrained_model_name_or_path: str | Path, **options: Any
        ) -> Self: ...

    else:  # errors become one line

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
    """Errors of the Hub as one line; those of files and options as they are."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("huggingface_hub", "httpx", "httpcore"):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{HUB}{name}: the Hugging Face Hub has not answered as expected; "
            f"{type(error).__name__}: {reason}; check name, network and login (hf auth login)"
        ) from None
