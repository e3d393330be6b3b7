"""``molflt schema``: what a configuration may hold, as JSON Schema, for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molflt.commands.limits import LIMITS
from molflt.commands.train import build_parser
from molflt.commands.values import item_types
from molflt.files import write_atomically
from molflt.training.recipes import DEFAULT, RECIPES

__all__ = ["config_schema", "schema"]

_Schema = dict[str, Any]
_HEADER = "# yaml-language-server: $schema="
_NO_KEYS = ("$schema", "resume")  # of the command line, and of jsonargparse's own files
_NOT_WRITTEN = {"heads", "dim", "head_dim", "node_heads", "node_dim"}  # the model's
_WRITTEN = {"image_generation": {"dim"}}  # recipe -> those of them that it leaves open


def schema(out: Path | None = None) -> None:
    """Writes the JSON Schema of configurations, with which an editor completes and checks them.

    It holds the keys of every recipe with their help, types, choices, ranges and defaults. A file
    names it in its first line: # yaml-language-server: $schema=molflt.schema.json

    Args:
        out: file to write; by default it is printed.
    """
    text = json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text.encode())
        print(f"written: {out}; first line of a configuration: {_HEADER}{out}")


def config_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of configurations: those of the recipe that a file names.

    Nothing is required, because configurations are given on top of each other.
    """
    whole: _Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of molflt",
        "type": "object",
        "properties": {},
        "allOf": [],
        "$defs": {},
    }
    for name in RECIPES:
        one = _of_recipe(name)
        whole["properties"]["recipe"] = {**one["properties"]["recipe"], "default": DEFAULT}
        whole["$defs"][name] = one
        named: _Schema = {"properties": {"recipe": {"const": name}}}
        if name != DEFAULT:
            named["required"] = ["recipe"]
        whole["allOf"].append({"if": named, "then": {"$ref": f"#/$defs/{name}"}})
    return whole


def _of_recipe(name: str) -> _Schema:
    parser = build_parser([f"--recipe={name}"])
    found: _Schema = json.loads(parser.get_completion_script("jsonschema"))
    del found["$schema"]
    for key, properties in _groups(found):
        for unknown in _NO_KEYS:
            properties.pop(unknown, None)
        for option, described in properties.items():
            interval = LIMITS.get(f"{key}{option}")
            if interval is not None and "object" not in described.get("type", ()):
                _bound(described, interval)
    options = found["properties"]["model"]["properties"].get("position_options")
    if options is not None:
        hidden = _NOT_WRITTEN - _WRITTEN.get(name, set())
        known = {key: value for key, value in _items().items() if key not in hidden}
        options |= {"properties": known, "additionalProperties": False}
    return found


def _groups(found: _Schema, prefix: str = "") -> Iterator[tuple[str, _Schema]]:
    """Prefix and properties of each object that has some; takes ``required`` off."""
    found.pop("required", None)
    if "properties" in found:
        yield prefix, found["properties"]
        for key, inner in found["properties"].items():
            yield from _groups(inner, f"{prefix}{key}.")


def _bound(described: _Schema, interval: str) -> None:
    """Adds the range of an option to its numbers, and to those of its items."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    described["minimum" if interval[0] == "[" else "exclusiveMinimum"] = low
    described["maximum" if interval[-1] == "]" else "exclusiveMaximum"] = high
    inside = [*described.get("anyOf", []), *described.get("prefixItems", [])]
    for part in [*inside, described.get("items"), described.get("additionalProperties")]:
        if isinstance(part, dict):
            _bound(part, interval)


def _items() -> _Schema:
    """Options of all positions, as `values` knows them, and of the model that makes them."""
    from jsonargparse import ArgumentParser

    from molflt.attention.nodes import NODES
    from molflt.attention.spectra import SPECTRA

    parser = ArgumentParser()
    for name, hint in item_types().items():
        parser.add_argument(f"--{name}", type=hint)
    found: _Schema = json.loads(parser.get_completion_script("jsonschema"))["properties"]
    del found["$schema"]
    for described in found.values():
        _bound(described, LIMITS["model.position_options"])
    found["spectrum"], found["nodes"] = {"enum": [*SPECTRA]}, {"enum": [*NODES, None]}
    return found
