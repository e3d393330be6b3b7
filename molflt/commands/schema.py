"""``molflt schema``: the JSON Schema of configurations, for editors."""

import json
from pathlib import Path
from typing import Any

from molflt.files import write_atomically
from molflt.training.recipes import DEFAULT, RECIPES
from molflt.training.start import build_parser

_Schema = dict[str, Any]
_HEADER = "# yaml-language-server: $schema="


def schema(out: Path | None = None) -> None:
    """Writes the JSON Schema of configurations, which lets editors complete and check them.

    It contains the keys of every recipe with help texts, types, choices and defaults. A
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
    combined: _Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of molflt",
        "type": "object",
        "properties": {},
        "allOf": [],
        "$defs": {},
    }
    for name in RECIPES:
        parser = build_parser([f"--recipe={name}"])
        options: _Schema = json.loads(parser.get_completion_script("jsonschema"))
        del options["$schema"]
        _simplify(options)
        combined["properties"]["recipe"] = {**options["properties"]["recipe"], "default": DEFAULT}
        combined["$defs"][name] = options
        condition: _Schema = {"properties": {"recipe": {"const": name}}}
        if name != DEFAULT:
            condition["required"] = ["recipe"]
        combined["allOf"].append({"if": condition, "then": {"$ref": f"#/$defs/{name}"}})
    return combined


def _simplify(schema: _Schema) -> None:
    """Removes requirements, and keys that only parsers accept, from all groups."""
    schema.pop("required", None)
    properties = schema.get("properties", {})
    for unknown in ("$schema", "resume"):
        properties.pop(unknown, None)
    for group in properties.values():
        _simplify(group)
