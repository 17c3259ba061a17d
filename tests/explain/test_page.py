"""The pass explorer in a browser: what it shows, and what one can do with it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.explain.synthetic import BACKWARD_LINES, FORWARD_LINES, PASSES, empty, hostile, model
from zgraph.explain.page import render

BLOCKS = 12  # of the model that most tests show: fewer load faster
BROWSER_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Opened:
    """A browser's page, and what it did that a test should know of."""

    page: Any
    folder: Path
    address: str = ""
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def show(self, data: dict[str, Any], name: str) -> None:
        """Opens the page of `data` in a fresh state; `name` is its file's."""
        file = self.folder / f"{name}.html"
        if not file.exists():
            file.write_text(render(data), encoding="utf-8")
        self.address = file.as_uri()
        self.requests.clear()
        self.errors.clear()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready]")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def shown(self, selector: str) -> list[str]:
        """Text of what is visible of `selector`."""
        return self.page.locator(f"{selector}:visible").all_inner_texts()

    def lane(self, name: str) -> tuple[float, float, float]:
        """Left edge and width of the timeline, and the middle of a lane."""
        canvas = self.page.locator("#canvas").bounding_box()
        label = self.page.locator(f'[data-lane="{name}"]').bounding_box()
        return canvas["x"], canvas["width"], label["y"] + label["height"] / 2

    def picture(self) -> str:
        """The timeline's pixels, once they are drawn."""
        frames = "new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))"
        self.page.evaluate(frames)
        return self.page.evaluate("document.getElementById('canvas').toDataURL()")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(5000)
    opened = Opened(page, tmp_path_factory.mktemp("explorer"))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("console", lambda said: opened.errors.append(said.text) if said.type == "error" else 0)
    return opened


@pytest.fixture(scope="module")
def llama() -> dict[str, Any]:
    return model(BLOCKS)


@pytest.fixture
def explorer(tab: Opened, llama: dict[str, Any]) -> Iterator[Opened]:
    """The page of a model, which must fetch nothing and log no error."""
    tab.show(llama, "llama")
    yield tab
    assert tab.requests == [tab.address]
    assert tab.errors == []


def test_a_model_of_80_blocks_is_shown_within_two_seconds(tab: Opened) -> None:
    tab.show(model(blocks=80), "large")
    assert float(tab.page.evaluate("document.documentElement.dataset.ready")) < 2000
    assert tab.page.title() == "Llama, 80 blocks, over shard=8 replicate=2"
    assert tab.text("#units-table tfoot").startswith("82 units")
    assert tab.text("#program-note") == "8,002 statements"
    assert len(tab.shown("#listing .row")) < 60
    assert tab.requests == [tab.address]
    assert tab.errors == []


def test_the_plan_is_shown(explorer: Opened) -> None:
    chips = explorer.shown(".chip")
    assert [chip.startswith(name) for chip, name in zip(chips, PASSES, strict=True)] == [True] * 12
    facts = explorer.text("#facts")
    assert "axis shard\n8 ranks" in facts
    assert "reshard after forward\nTrue" in facts


def test_a_unit_opens_to_its_parameters(explorer: Opened) -> None:
    explorer.page.get_by_label("Parameters of layers.7", exact=True).click()
    row = explorer.shown("tr.inside tbody tr")[0]
    assert row.split() == ["attention.wq", "[8192,", "8192]", "67,108,864", "f32/bf16/f32"]


def test_collectives_have_totals(explorer: Opened) -> None:
    totals = explorer.text("#collectives-table tfoot").split()
    sizes = [" ".join(totals[at + 2 : at + 4]) for at in range(1, len(totals), 4)]
    assert totals[1::4] == [str(BLOCKS + 2)] * 4
    assert sizes == ["19.5 GiB", "19.5 GiB", "39.0 GiB", "5.58 GiB"]
    assert explorer.text("#collectives-note").endswith(
        "over shard 78.1 GiB, over replicate 5.58 GiB"
    )


def test_memory_that_is_not_alive_at_the_peak_stays_out_of_the_bar(explorer: Opened) -> None:
    segments = explorer.page.locator("#stack span").all_inner_texts()
    assert segments[0] == "parameters"
    assert segments[-1] == "temporaries"
    assert explorer.shown("#shares div")[-1].splitlines() == [
        "gradients after backward",
        "4.78 GiB",
    ]


def test_the_peak_of_memory_leads_to_its_statement(explorer: Opened) -> None:
    explorer.page.click("#peak-node")
    assert explorer.text("#program-h") == "Program: backward"
    assert "mm_layers_11_16: bf16" in explorer.text("#listing .row.selected")


def test_search_narrows_tables_and_marks_timeline_and_program(explorer: Opened) -> None:
    before = explorer.picture()
    explorer.page.keyboard.press("/")
    explorer.page.keyboard.type("layers.1")
    assert [row.split()[0] for row in explorer.shown("#units-table tr.unit")] == ["layers.1"]
    assert [row.split()[0] for row in explorer.shown("#collectives-table tr.unit")] == ["layers.1"]
    assert explorer.text("#units-table tfoot").split()[:4] == ["1", "of", "14", "units"]
    assert explorer.text("#matches") == f"{FORWARD_LINES} lines"
    marked = explorer.picture()
    assert marked != before
    explorer.page.keyboard.press("Enter")
    assert explorer.text("#matches") == f"1 of {FORWARD_LINES}"
    assert "gather_layers_1: " in explorer.text("#listing .row.hit.selected")
    explorer.page.keyboard.press("Shift+Enter")
    assert explorer.text("#matches") == f"{FORWARD_LINES} of {FORWARD_LINES}"
    explorer.page.keyboard.press("Escape")
    assert len(explorer.shown("#units-table tr.unit")) == BLOCKS + 2


def test_part_of_a_name_finds_several_units(explorer: Opened) -> None:
    explorer.page.fill("#query", "ayers.1")
    found = [row.split()[0] for row in explorer.shown("#units-table tr.unit")]
    assert found == ["layers.1", "layers.10", "layers.11"]


def test_what_names_no_unit_is_sought_in_statements(explorer: Opened) -> None:
    explorer.page.fill("#query", "aten.silu(view_62")
    assert explorer.text("#matches") == f"{BLOCKS} lines"


def test_a_bar_tells_about_its_statement_and_leads_to_it(explorer: Opened) -> None:
    explorer.page.locator("#timeline").scroll_into_view_if_needed()
    left, width, middle = explorer.lane("all-gather")
    explorer.page.mouse.move(left + width / 2, middle)
    for _ in range(8):
        explorer.page.mouse.wheel(0, -200)
    left, width, middle = explorer.lane("compute")
    explorer.page.mouse.move(left + width / 2, middle)
    statement, *facts = explorer.text("#tip").splitlines()
    assert facts[0::2] == ["unit", "module", "time", "alive"]
    explorer.page.mouse.click(left + width / 2, middle)
    selected = explorer.page.locator("#listing .row.selected")
    assert statement in selected.inner_text()
    assert 0 < selected.bounding_box()["y"] < 800
    assert statement.split(" = ")[0] in explorer.text("#detail")


def test_the_timeline_zooms_and_pans(explorer: Opened) -> None:
    whole = explorer.text("#range")
    explorer.page.click("#zoom-in")
    zoomed = explorer.picture()
    halved = explorer.text("#range")
    assert halved != whole
    left, width, middle = explorer.lane("compute")
    explorer.page.mouse.move(left + width / 2, middle)
    explorer.page.mouse.down()
    explorer.page.mouse.move(left + width / 4, middle, steps=3)
    explorer.page.mouse.up()
    assert explorer.picture() != zoomed
    assert explorer.text("#range") != halved
    assert explorer.page.locator("#listing .row.selected").count() == 0
    explorer.page.click("#fit")
    explorer.picture()
    assert explorer.text("#range") == whole


def test_the_timeline_can_be_walked_by_keys(explorer: Opened) -> None:
    explorer.page.focus("#plot")
    explorer.page.keyboard.press("ArrowRight")
    assert explorer.text("#detail").startswith("gather_layers_0: ")
    explorer.page.keyboard.press("ArrowRight")
    assert explorer.text("#detail").startswith("gather_layers_1: ")
    explorer.page.keyboard.press("ArrowLeft")
    assert explorer.text("#detail").startswith("gather_layers_0: ")


def test_switching_the_program_changes_every_view_of_it(explorer: Opened) -> None:
    explorer.page.fill("#query", "layers.7")
    before = explorer.picture()
    explorer.page.get_by_role("button", name="backward", exact=True).click()
    assert explorer.text("#timeline-h") == "Timeline: backward"
    assert explorer.text("#program-note") == f"{BLOCKS * BACKWARD_LINES + 2:,} statements"
    assert explorer.text("#matches") == f"{BACKWARD_LINES} lines"
    assert explorer.picture() != before
    lanes = ["all-gather", "reduce-scatter", "all-reduce"]
    assert [name for name in explorer.shown("#lanes div") if name in lanes] == lanes


def test_each_pass_opens_what_it_changed(explorer: Opened, llama: dict[str, Any]) -> None:
    for i, entry in enumerate(llama["passes"]):
        explorer.page.click(f'#entries [data-entry="{i}"]')
        assert explorer.text("#pass-name") == entry["name"]
        if not entry["diff"]:
            assert explorer.text("#unchanged") == f"{entry['name']} changed nothing in this graph."
            assert explorer.shown("#diff") == []
            continue
        tags = explorer.page.locator("#diff .gutter").all_inner_texts()
        expected = [tag.strip() for tag, _ in entry["diff"]]
        assert [tag.strip() for tag in tags] == expected[: len(tags)]


def test_a_chip_opens_its_pass_and_arrows_go_from_change_to_change(explorer: Opened) -> None:
    explorer.page.locator(".chip", has_text="prefetch").click()
    assert explorer.text("#pass-name") == "prefetch{units=1}"
    assert explorer.text("#pass-note") == "forward graph"
    assert explorer.page.locator("#passes").bounding_box()["y"] < 100
    explorer.page.click("#hunk-next")
    assert explorer.page.evaluate("document.getElementById('diff').scrollTop") > 0
    explorer.page.click("#hunk-previous")
    assert explorer.page.evaluate("document.getElementById('diff').scrollTop") == 0


HOSTILE = {
    "end-of-script": "</script><b>bold</b>",
    "handler": "<img src=x onerror=document.title='taken'>",
    "comment": "<!--<script>",
    "quotes": "line\u2028 \\ \"quoted\" 'and' ${code} &lt;",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_names_are_shown_as_text(tab: Opened, kind: str) -> None:
    name = HOSTILE[kind]
    tab.show(hostile(name), kind)
    tab.page.locator(".toggle").nth(1).click()
    tab.page.fill("#query", name)
    tab.page.fill("#query", "")
    tab.page.click(".chip")
    for selector in ("#title", "#facts dd >> nth=-1", ".chip", "#shares span >> nth=0"):
        assert name in tab.page.locator(selector).text_content()
    for selector in ("#assumptions", "#programs button >> nth=0", "#pass-name", "#units-table"):
        assert name in tab.page.locator(selector).text_content()
    assert tab.page.locator("b:has-text('bold'), img").count() == 0
    assert tab.page.title() != "taken"
    assert tab.requests == [tab.address]
    assert tab.errors == []


def test_there_is_a_page_before_anything_was_captured(tab: Opened) -> None:
    tab.show(empty(), "empty")
    assert tab.text(".chip") == "partition plan"
    assert not tab.page.locator("#timeline").is_visible()
    assert tab.errors == []
