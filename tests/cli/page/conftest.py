import pytest

from slipstream.schedules.schedule import Worker
from tests.cli.page.pages import EXAMPLE, write_page
from tests.generate import planned


@pytest.fixture(scope="package")
def schedule():
    return planned(EXAMPLE, [Worker(1, 2)])


@pytest.fixture
def page(chromium, tmp_path, schedule):
    with chromium.open(write_page(tmp_path, schedule)) as opened:
        opened.frame()
        yield opened
