"""YAML whose keys are unique, as YAML demands, and without references."""

from pathlib import Path
from typing import Any

import yaml

from molflt.files import shown

__all__ = ["Loader", "read_yaml"]

_MOST_BYTES = 1_000_000


class Loader(yaml.SafeLoader):
    """Refuse equal keys, of which PyYAML drops all but the last, and references.

    A few lines of references could make more than fits into memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: references (*name) are not read; repeat the value")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a node as PyYAML does, without references."""
        found = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in found.value:
            # Other keys than words name no option.
            if key.tag != "tag:yaml.org,2002:str":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"key {shown(key.value, 30)} in lines {lines[key.value]} and {line}; "
                    "expected it once; join them"
                )
            lines[key.value] = line
        return found


def read_yaml(path: Path, advice: str) -> dict[str, object]:
    """Keys and values of a YAML file.

    Args:
        path: the file.
        advice: what to do if it is wrong.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(
            f"{path}: expected a configuration of at most {_MOST_BYTES:,} bytes; got "
            f"{path.stat().st_size:,}"
        )
    try:
        content = yaml.load(path.read_bytes().decode(), Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; {advice}") from None
    except RecursionError:
        raise ValueError(
            f"{path}: expected `key: value`; got too many brackets; {advice}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{path}: {place}not YAML: {shown(str(problem))}; {advice}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `key: value`; got {shown(content)}; {advice}")
    return content
