"""The page of a report in a real browser: what moves and answers, and that it asks for nothing."""

import pytest
from page_made import MICROBATCHES, STAGES, write_page

pytest.importorskip("selenium")

from real_browser import (
    BROWSER,
    DRIVER,
    WIDTHS_PX,
    open_page,
    show_as,
    started_browser,
    troubles,
)
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from envpipe_megatron.report.charts import GREY, Chart, Choice, Marks, View
from envpipe_megatron.report.page.document import page_text

pytestmark = [
    pytest.mark.xdist_group("browser"),  # one start of it
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="chromium and chromedriver are not installed"
    ),
]


class Page:
    """A page in a browser of some width, and what its plots say of themselves."""

    def __init__(self, driver, path):
        self.driver = driver
        open_page(driver, path)

    def ask(self, code, *values):
        return self.driver.execute_script(code, *values)

    def until(self, code):
        WebDriverWait(self.driver, 30, poll_frequency=0.05).until(lambda _: self.ask(code))

    def of(self, name, code):
        """Return what code says of `it`, a plot or a part of one."""
        return self.ask(
            f"const it = Bokeh.documents[0].get_model_by_name(arguments[0]); return {code}", name
        )

    def range_of(self, plot):
        return self.of(plot, "[it.x_range.start, it.x_range.end]")

    def shown(self, plot):
        """The rows of the units that a timeline shows."""
        return self.of(f"{plot} units", "Array.from(it.view.filter.indices)")

    def names_above(self, plot):
        items = "it.above.at(-1).items.filter((item) => item.visible)"
        return self.of(plot, f"{items}.map((item) => item.label.value)")

    def frame(self, plot):
        return self.driver.find_element(By.CSS_SELECTOR, f"[data-plot='{plot}']")

    def choose(self, key, text):
        Select(self.driver.find_element(By.ID, key)).select_by_visible_text(text)

    def pointer_to(self, plot, x, y):
        """Move the pointer to a place of a plot, in its own units."""
        left, top = self.ask(
            "const plot = Bokeh.documents[0].get_model_by_name(arguments[0]);"
            "arguments[3].scrollIntoView({block: 'center'});"
            "const view = Bokeh.index.find_one_by_id(plot.id);"
            "const box = view.el.getBoundingClientRect(), inner = view.frame;"
            "return [box.left + inner.x_scale.compute(arguments[1]),"
            "        box.top + inner.y_scale.compute(arguments[2])]",
            plot, x, y, self.frame(plot),
        )  # fmt: skip
        actions = ActionChains(self.driver)
        actions.w3c_actions.pointer_action.move_to_location(round(left), round(top))
        return actions

    def tips(self):
        """The text of all tooltips, which stand in shadow trees."""
        return self.ask(
            "const texts = [], look = (root) => { for (const el of root.querySelectorAll('*')) {"
            "if (el.className === 'bk-Tooltip' || String(el.className).includes('ooltip'))"
            "texts.push((el.shadowRoot ?? el).textContent);"
            "if (el.shadowRoot) look(el.shadowRoot); } }; look(document); return texts.join(' ')"
        )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def driver():
    with started_browser() as started:
        yield started


@pytest.fixture
def page(driver, path):
    show_as(driver, WIDTHS_PX[0])
    return Page(driver, path)


@pytest.mark.parametrize(("width", "dark"), [(WIDTHS_PX[0], False), (WIDTHS_PX[1], True)])
def test_it_fits_and_asks_for_nothing_and_has_no_error(driver, path, width, dark):
    troubles(driver)  # those of earlier pages
    show_as(driver, width, dark=dark)
    page = Page(driver, path)
    assert page.ask("return document.documentElement.scrollWidth") <= width
    page.until("return document.querySelectorAll('.plot').length > 5")
    colour = page.of("after", "it.background_fill_color")
    assert colour == ("#16181b" if dark else "#ffffff")
    cells = "[...document.querySelectorAll('td, th')]"
    rights = page.ask(f"return {cells}.map((cell) => cell.getBoundingClientRect().right)")
    assert max(rights) <= width
    assert troubles(driver) == ([], [])


def test_keys_zoom_and_move_and_both_timelines_follow(page):
    whole = page.range_of("before")
    frame = page.frame("before")
    frame.send_keys("+")
    zoomed = page.range_of("before")
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    assert page.range_of("after") == zoomed
    frame.send_keys(Keys.ARROW_LEFT)
    assert page.range_of("after")[0] < zoomed[0]
    frame.send_keys("0")
    assert page.range_of("before") == pytest.approx(whole)


def test_every_control_is_reached_by_the_tab_key_and_named(page):
    controls = page.driver.find_elements(By.CSS_SELECTOR, "select, [data-move], .plot")
    assert all(page.ask("return arguments[0].tabIndex", control) == 0 for control in controls)
    assert all(control.accessible_name for control in controls)


def test_buttons_zoom_without_a_wheel(page):
    whole = page.range_of("iterations-time_s")
    view = page.driver.find_element(By.ID, "iterations")
    view.find_element(By.CSS_SELECTOR, "[data-move=in]").click()
    assert page.range_of("iterations-time_s")[1] < whole[1]
    view.find_element(By.CSS_SELECTOR, "[data-move=whole]").click()
    assert page.range_of("iterations-time_s") == pytest.approx(whole)


def wheel(page, plot, *, ctrl):
    """Turn the wheel over a plot, with ctrl or without."""
    page.pointer_to(plot, 20.0, 1.0).perform()
    place = "const b = arguments[0].getBoundingClientRect(); return [b.left + 300, b.top + 80]"
    actions = ActionChains(page.driver)
    if ctrl:
        actions.key_down(Keys.CONTROL)
    x, y = map(round, page.ask(place, page.frame(plot)))
    actions.scroll_from_origin(ScrollOrigin.from_viewport(x, y), 0, -240)
    if ctrl:
        actions.key_up(Keys.CONTROL)
    actions.perform()


def test_the_wheel_zooms_with_ctrl_alone_and_dragging_moves(page):
    before = page.range_of("after")
    wheel(page, "after", ctrl=False)
    assert page.range_of("after") == before  # it scrolls down the page
    wheel(page, "after", ctrl=True)
    page.until(
        "return Bokeh.documents[0].get_model_by_name('after').x_range.end - "
        f"Bokeh.documents[0].get_model_by_name('after').x_range.start < {before[1] - before[0]}"
    )
    zoomed = page.range_of("after")
    drag = page.pointer_to("after", zoomed[0] + 0.5 * (zoomed[1] - zoomed[0]), 1.0)
    drag.w3c_actions.pointer_action.pointer_down()
    drag.w3c_actions.pointer_action.move_by(-60, 0)
    drag.w3c_actions.pointer_action.pointer_up()
    drag.perform()
    page.until(
        f"return Bokeh.documents[0].get_model_by_name('after').x_range.start !== {zoomed[0]}"
    )
    assert page.range_of("before") == page.range_of("after")


def test_the_pointer_tells_unit_clock_energy_and_slack(page):
    page.pointer_to("after", 5.0, 0.0).perform()  # the first forward of the first stage
    page.until("return document.querySelector('.plot') !== null")
    WebDriverWait(page.driver, 10, poll_frequency=0.05).until(lambda _: "F0" in page.tips())
    told = page.tips()
    for wanted in ("1200", "2.400", "slack (ms)", "critical path", "yes"):
        assert wanted in told


def test_another_iteration_pipeline_and_colour_can_be_chosen(page):
    units = 2 * STAGES * 2 * MICROBATCHES
    assert page.shown("after") == list(range(2 * units, 3 * units))
    page.choose("after-group", "profile, 1: 0.18 s")
    assert page.shown("after") == list(range(units, 2 * units))
    assert page.shown("before") == list(range(units))
    page.choose("pipeline", "pipeline 1")
    rows = page.of("after", "[it.y_range.start, it.y_range.end]")
    assert rows == [2 * STAGES - 0.5, STAGES - 0.5]
    page.choose("colour", "kind")
    field = "it.glyph.fill_color.field"
    assert page.of("after units", field) == "kind"
    page.choose("colour", "power (W)")
    assert page.of("after units", field) == "watts"


def test_units_have_their_names_where_these_fit_and_gpus_their_waits(page):
    labels = "Array.from(it.view.filter.indices)"
    assert page.of("after labels", labels) == page.shown("after")
    page.choose("after-group", "profile, 1: 0.18 s")
    assert page.of("after labels", labels) == page.shown("after")
    show_as(page.driver, WIDTHS_PX[1])
    page.until("return Bokeh.documents[0].get_model_by_name('after').inner_width < 300")
    page.until(
        "const it = Bokeh.documents[0].get_model_by_name('after labels');"
        "const names = it.view.filter.indices.map((i) => it.data_source.data.label[i]);"
        "return names.length > 0 && names.every((name) => name[0] === 'B')"
    )
    begins = "Array.from(it.view.filter.indices).map((i) => it.data_source.data.begin[i])"
    rows = "Array.from(it.view.filter.indices).map((i) => it.data_source.data.row[i])"
    waits = set(
        zip(page.of("after GPU waits", rows), page.of("after GPU waits", begins), strict=True)
    )
    assert {(row, 0.0) for row in range(2 * STAGES) if row % STAGES} <= waits


def test_power_of_nodes_and_the_clock_of_another_rank_can_be_chosen(page):
    rows = "Array.from(it.renderers[0].view.filter.indices)"
    assert page.of("power", rows) == [*range(6)]
    page.choose("power-group", "each node")
    assert page.of("power", rows) == [6, 7]
    assert page.names_above("power") == ["n1", "n2"]
    page.choose("clocks-group", "rank 3, stage 1")
    assert page.of("clocks", rows) == [8, 9]
    assert page.names_above("clocks") == ["seen", "asked for"]


def test_a_group_without_names_can_be_chosen(driver, tmp_path):
    """More lines than colours have no names: 9 GPUs of 9 nodes have no legend at all."""
    groups = ["each GPU"] * 9 + ["each node"] * 9
    names = [f"{group} {number}" for number, group in enumerate(groups)]
    columns = {"x": [[0, 1]] * 18, "y": [[2, 3]] * 18, "group": groups, "name": names}
    chart = Chart(
        "many",
        "x",
        "y",
        [Marks("line", "", GREY, columns)],
        choice=Choice.of("Power of", ["each GPU", "each node"]),
    )
    views = [View("many", "Many", "", [chart])]
    path = tmp_path / "index.html"
    path.write_text(page_text("A job", (), (), "report", (), views))
    troubles(driver)
    page = Page(driver, path)
    page.choose("many-group", "each node")
    assert page.of("many", "Array.from(it.renderers[0].view.filter.indices)") == [*range(9, 18)]
    assert troubles(driver) == ([], [])


def test_phases_and_gpus_have_their_names_above(page):
    assert page.names_above("iterations-time_s") == ["warm-up", "profile", "steady"]
    gpus = page.names_above("power")
    assert gpus[:2] == ["rank 0 · stage 0", "rank 1 · stage 0"]
    assert len(gpus) == 6


def test_what_held_clocks_back_has_a_row_for_each_gpu(page):
    """Two reasons of each of six GPUs, and none while they were idle."""
    boxes = "it.renderers.map((one) => Array.from(one.data_source.data.end))"
    assert page.of("held-back", boxes) == [[0.5] * 6 + [1.0] * 6]
    tips = "it.toolbar.tools.filter((tool) => tool.tooltips).map((tool) => tool.tooltips[1][1])"
    told = set(page.of("held-back", tips))
    assert told == {"@name"}, "a tip's own text would be taken for HTML"
