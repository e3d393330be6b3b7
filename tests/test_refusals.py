"""Refused inputs: messages are one line, with the option, the expected and the actual value."""

import importlib
import pkgutil
from pathlib import Path

import pytest
import refusals
from refusals import Refusal

TABLES = [module.name for module in pkgutil.iter_modules(refusals.__path__)]
ROWS = [
    pytest.param(row, id=f"{table}-{i}-{row.option}")
    for table in TABLES
    for i, row in enumerate(importlib.import_module(f"refusals.{table}").ROWS)
]


@pytest.mark.parametrize("row", ROWS)
def test_refusals_name_option_expectation_and_value(row: Refusal, tmp_path: Path) -> None:
    with pytest.raises(row.error) as caught:
        row.call(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    assert [word for word in row.words if word.lower() not in message.lower()] == []
