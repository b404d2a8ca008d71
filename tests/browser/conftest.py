import pytest
from browser import chromium


@pytest.fixture(scope="session")
def tab(tmp_path_factory):
    program = chromium.found()
    if program is None:
        pytest.fail("no Chromium here: apt-get install chromium")
    with chromium.tab(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(params=["phone", "desktop", "dark"])
def shown(request, tab):
    """A browser of some kind, with nothing open."""
    width = 390 if request.param == "phone" else 1200
    scheme = "dark" if request.param == "dark" else "light"
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        **{"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    tab.call("Emulation.setEmulatedMedia", features=[feature])
    return tab, request.param
