"""Sphinx: the Markdown files of the repository as pages, the reference from the docstrings.

The source folder is the root of the repository, so that the links between docs/, configs/,
datasets/ and CONTRIBUTING.md are the same here and on a site that shows the files. Nothing is
fetched while building.
"""

import re
from typing import TYPE_CHECKING

import molflt.attention

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "molflt"
version = release = molflt.__version__
copyright = "the authors of molflt, MIT license"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "configs/**README.md",
    "datasets/**.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = ["docs/_build", "**/.*", "runs", "shared", "molflt", "tests", "scripts"]

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

html_theme = "furo"
html_title = f"molflt {release}"
html_domain_indices = False
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_extra_path = ["_static/index.html"]
copybutton_exclude = ".linenos, .gp, .go"

# --- the reference --------------------------------------------------------------------------

default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "extra_repr"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
nitpicky = True
nitpick_ignore_regex = [("py:(class|data|obj|attr)", r".*")]  # types of other packages


def _escape(app: object, what: str, name: str, obj: object, options: object, lines: list) -> None:
    """Docstrings have |x| for an absolute value and g_ for a prefix; reStructuredText does not."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``|`.*?`)", line)
        parts[::2] = [re.sub(r"\||(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
        lines[i] = "".join(parts)
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"  # the text before a first colon would be taken for a type


def _skip(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool:
    """Fields of named tuples without a docstring have one that says nothing."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def _list_children(app: object, name: str, source: list) -> None:
    """Pages below configs/ and datasets/ into the navigation: on other sites that list is noise."""
    pages = {"configs/README": "*/README", "datasets/README": "*/README\n*"}
    if name in pages:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages[name]}\n```\n"


def _list_classes(app: object, name: str, source: list) -> None:
    """Replaces the comment that names a dictionary of attention with a list of its classes."""
    if name == "docs/reference/parts":
        for dictionary in ("SPECTRA", "NODES"):
            package = f"molflt.attention.{dictionary.lower()}"
            classes = getattr(molflt.attention, dictionary).values()
            lines = "\n".join(f".. autoclass:: {package}.{each.__name__}" for each in classes)
            block = f"```{{eval-rst}}\n{lines}\n```"
            source[0] = source[0].replace(f"<!-- classes of {dictionary} -->", block)


def setup(app: "Sphinx") -> None:
    app.connect("autodoc-skip-member", _skip)
    app.connect("source-read", _list_children)
    app.connect("source-read", _list_classes)
    app.connect("autodoc-process-docstring", _escape, priority=400)  # before napoleon
