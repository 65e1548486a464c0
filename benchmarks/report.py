"""Write the tables of README.md and docs/ from the files under benchmarks/results.

    python benchmarks/report.py           # rewrite what stands between the markers
    python benchmarks/report.py --check   # exit 1 if a page is out of date

A page asks for a table by `<!-- table: NAME -->` and ends it by `<!-- end -->`; NAME is a key of TABLES.
"""

import argparse
import csv
import pathlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARKER = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
Row = dict[str, str]


@dataclass
class Table:
    """A table of a page.

    Attributes:
        file: name under benchmarks/results.
        columns: column of the file to heading.
        keep: which rows.
        record: columns of the file that tell what was measured on; they make the line below the table.
    """

    file: str
    columns: dict[str, str]
    keep: Callable[[Row], bool] = lambda row: True
    record: tuple[str, ...] = field(default=("device", "packages", "date"))


TABLES = {
    "quickstart": Table("quickstart.csv", {"measure": "`make demo`", "torch": "torch", "qsub": "qsub"}),
}


def _cell(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return text
    return text if number == int(number) or len(text) <= 7 else f"{number:.4g}"


def render(table: Table) -> str:
    """The table as markdown, with the machine and the versions below."""
    with open(RESULTS / table.file, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if table.keep(row)]
    lines = ["| " + " | ".join(table.columns.values()) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in table.columns) + " |" for row in rows]
    record = "; ".join(rows[0][name] for name in table.record if rows[0].get(name))
    return "\n".join([*lines, "", f"Measured on {record}; `benchmarks/results/{table.file}`."])


def fill(page: str) -> str:
    """The page with each table rendered anew."""
    return MARKER.sub(lambda m: f"<!-- table: {m[1]} -->\n{render(TABLES[m[1]])}\n<!-- end -->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        new = fill(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    print(("out of date: " if check else "written: ") + (", ".join(stale) or "nothing"))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
