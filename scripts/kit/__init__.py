"""Helpers shared by scripts, and the interface of benchmarks for `scripts/run.py`.

Modules in cost/, accuracy/ and training/ have their title in the first line, and define

    measure(...) -> Rows      its arguments need defaults and become command-line options
    table(rows) -> str        formats the rows, read back from a CSV file, as Markdown
    draw(png, rows)           optional; draws a figure
    QUICK                     arguments of `measure` for the smallest size
"""
