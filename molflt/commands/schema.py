"""``molflt schema``: the JSON Schema of configurations, for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molflt.commands.options import position_parser
from molflt.commands.train import build_parser
from molflt.files import write_atomically
from molflt.training.limits import LIMITS
from molflt.training.recipes import DEFAULT, RECIPES

__all__ = ["config_schema", "schema"]

_Schema = dict[str, Any]
_HEADER = "# yaml-language-server: $schema="
_SET_BY_MODEL = {"heads", "dim", "head_dim", "node_heads", "node_dim"}
_SET_BY_USER = {"image_generation": {"dim"}}  # exceptions to the above, by recipe


def schema(out: Path | None = None) -> None:
    """Writes the JSON Schema of configurations, which lets editors complete and check them.

    It contains the keys of every recipe with help texts, types, choices, ranges and defaults. A
    configuration refers to it in its first line: # yaml-language-server: $schema=molflt.schema.json

    Args:
        out: file to write; by default the schema is printed.
    """
    text = json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text.encode())
        print(f"written: {out}; first line of a configuration: {_HEADER}{out}")


def config_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of configurations.

    The recipe named in a file determines which keys are valid. No key is required, because
    configurations can be combined.
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
        for unknown in ("$schema", "resume"):  # only parsers accept them
            properties.pop(unknown, None)
        for option, described in properties.items():
            interval = LIMITS.get(f"{key}{option}")
            if interval is not None and "object" not in described.get("type", ()):
                _bound(described, interval)
    options = found["properties"]["model"]["properties"].get("position_options")
    if options is not None:
        hidden = _SET_BY_MODEL - _SET_BY_USER.get(name, set())
        known = {key: value for key, value in _position().items() if key not in hidden}
        options |= {"properties": known, "additionalProperties": False}
    return found


def _groups(found: _Schema, prefix: str = "") -> Iterator[tuple[str, _Schema]]:
    """Yields the prefix and properties of each object in a schema; removes its key ``required``."""
    found.pop("required", None)
    if "properties" in found:
        yield prefix, found["properties"]
        for key, inner in found["properties"].items():
            yield from _groups(inner, f"{prefix}{key}.")


def _bound(described: _Schema, interval: str) -> None:
    low, high = (float(end) for end in interval[1:-1].split(","))
    described["minimum" if interval[0] == "[" else "exclusiveMinimum"] = low
    described["maximum" if interval[-1] == "]" else "exclusiveMaximum"] = high
    inside = [*described.get("anyOf", []), *described.get("prefixItems", [])]
    for part in [*inside, described.get("items"), described.get("additionalProperties")]:
        if isinstance(part, dict):
            _bound(part, interval)


def _position() -> _Schema:
    from molflt.attention.nodes import NODES
    from molflt.attention.spectra import SPECTRA

    script = position_parser().get_completion_script("jsonschema")
    found: _Schema = json.loads(script)["properties"]
    del found["$schema"]
    for described in found.values():
        _bound(described, LIMITS["model.position_options"])
    found["spectrum"], found["nodes"] = {"enum": [*SPECTRA]}, {"enum": [*NODES, None]}
    return found
