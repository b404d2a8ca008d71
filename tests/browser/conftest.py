import pytest
from browser import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    chromium_program = chromium.program()
    if chromium_program is None:
        pytest.fail("no Chromium here: apt-get install chromium")
    with chromium.running(chromium_program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def tab(browser):
    """A page of its own for each test: what an earlier page still does is not this one's."""
    tab = chromium.Tab(browser)
    yield tab
    tab.close()


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
