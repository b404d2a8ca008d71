"""A report as one self-contained HTML file.

The HTML needs nothing but itself: images, styles and the script that draws curves are inlined, and
there is no font and no address.
"""

from pathlib import Path

from decaylab.document import Report
from decaylab.errors import BadValue
from decaylab.records.files import disk_errors, replace_text
from decaylab.report.curves import asset, curves, script
from decaylab.report.drawing import check_extra, needed


def check_page(path: Path) -> None:
    """Refuse a page that is not named as HTML, or that cannot be drawn here."""
    if path.suffix not in (".html", ".htm"):
        wanted = "an HTML file"
        raise BadValue("the report", path.name, wanted, f"give {path.with_suffix('.html')}")
    check_extra()


def write_html(path: Path, report: Report) -> None:
    """Write a report as one HTML file."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, to_html(report))


def to_html(report: Report) -> str:
    """The report as one HTML file."""
    jinja2 = needed("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("decaylab.report", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    raw = jinja2.utils.markupsafe.Markup
    style = raw(asset("uPlot.min.css") + asset("page.css"))
    drawn = any(block.charts for section in report.sections for block in section.blocks)
    code = raw(script() if drawn else "")
    environment.filters["curves"] = curves
    template = environment.get_template("page.html.jinja")
    text: str = template.render(report=report, style=style, script=code, menu=raw(asset("menu.js")))
    return text
