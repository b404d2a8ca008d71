"""The picture of Fig. 5 in docs/reproduction.md, drawn from the records in results/.

`make results-pages` draws it. It carries a fingerprint of the numbers it shows, so that a test
can tell when it is out of date, whatever version of matplotlib drew it.
"""

import hashlib
import io
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from decaylab.paper import FinishedRuns, artefact_of
from decaylab.records import RunStore
from decaylab.report.figures import panels_csv
from decaylab.report.sections import fill
from decaylab.report.sheets import draw_sheets

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "fig5.png"
TIER = "short"


def panels():
    """Fig. 5's panels at the tier that was run."""
    return fill(artefact_of("fig5"), TIER, FinishedRuns(RunStore(ROOT / "results")), seeds=1).panels


def fingerprint(drawn) -> str:
    """Of the numbers that panels show."""
    return hashlib.sha256(panels_csv([(TIER, drawn)]).encode()).hexdigest()


def main() -> None:
    """Draw it."""
    drawn = panels()
    numbers = PngInfo()
    numbers.add_text("numbers", fingerprint(drawn))
    sheet = Image.open(io.BytesIO(draw_sheets({"fig5": drawn})["fig5"].png))
    sheet.save(PICTURE, pnginfo=numbers, optimize=True)


if __name__ == "__main__":
    main()
