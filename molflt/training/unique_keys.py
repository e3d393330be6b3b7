"""YAML whose keys are unique, as YAML demands; PyYAML keeps the last one and drops the others."""

from typing import Any

import yaml

from molflt.files import shown

__all__ = ["UniqueKeys"]


class UniqueKeys(yaml.SafeLoader):
    """Refuses keys and values of which two have the same key."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML's.

        Raises:
            YAMLError: naming the key and both lines.
        """
        found = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in found.value:
            # Several merges, `<<: *name`, go together; other keys than words name no option.
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
