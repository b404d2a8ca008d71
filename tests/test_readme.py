"""What README says of results is what the records say."""

import re
from pathlib import Path

from decaylab.paper import Readings, artefact_of
from decaylab.records import RunStore
from decaylab.report.page import Report, to_markdown
from decaylab.report.sections import fill, tables_section

ROOT = Path(__file__).parents[1]


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def filled_rows() -> list[str]:
    """Table 1 as the report writes it, without the rows that no run has filled."""
    readings = Readings(RunStore(ROOT / "results"))
    filled = fill(artefact_of("table1"), "short", readings, seeds=10)
    report = Report("", "", [tables_section([filled], readings, "short")])
    return [row for row in table_rows(to_markdown(report)) if not row.endswith("| none |")]


def test_the_table_is_that_of_the_records():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- table 1 -->(.*)<!-- end -->", readme, re.DOTALL)
    assert block is not None
    assert len(filled_rows()) > 2
    assert table_rows(block[1]) == filled_rows()
