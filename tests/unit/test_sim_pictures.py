"""Pictures and reports: they are drawn from any recording, and a report needs nothing else."""

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sim_worlds import changed

from sim.compare import Comparison, compare
from sim.plot_map import arc, draw_map, load_places, load_world, project
from sim.plots import draw_lag, draw_run
from sim.plots_compare import draw_comparison, draw_sweep
from sim.recording import Recording
from sim.report import comparison_report, report, run_report, sweep_report
from sim.run import Result, Simulation
from sim.scenario import PolicyShape
from sim.sweep import sweep
from sim.topology import load_regions
from transport.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the plots extra"
)


def recorded(**changes: object) -> tuple[Result, Recording]:
    simulation = Simulation(changed(**changes), record=True)
    result = simulation.run()
    assert simulation.recording is not None
    return result, simulation.recording


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(changed(steps=3), ["finish-time", "nearest"], range(2))


class Page(HTMLParser):
    """Everything that a page would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@needs_matplotlib
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="small"),
        pytest.param({"limit_s": 0.5}, id="nothing-happened"),
        pytest.param(
            {"sites": {}, "regions": "aws12-2022", "steps": 2},
            id="regions",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"policies": {n: PolicyShape(batch_groups=4) for n in ("a", "b")}},
            id="two-policies",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_pictures_of_a_run_and_its_report(tmp_path: Path, changes: dict[str, object]) -> None:
    result, recording = recorded(**changes)
    pictures = draw_run(recording, tmp_path)
    assert len(pictures) == 6
    for path in pictures.values():
        data = path.read_bytes()
        assert data.startswith(PNG)
        assert 4_000 < len(data) < 400_000
        assert b"Matplotlib" not in data
    page = Page(run_report(result, pictures, about="<about & so>", source="{}"))
    assert not page.open
    assert len(page.loads) == 6
    assert all(load.startswith("data:image/png;base64,") for load in page.loads)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert "<about & so>" in page.words


@needs_matplotlib
def test_equal_recordings_give_equal_pictures(tmp_path: Path) -> None:
    _, recording = recorded(steps=2)
    for name in ("one", "other"):
        draw_lag(recording, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@needs_matplotlib
def test_a_map_is_drawn_where_places_are_known(tmp_path: Path) -> None:
    _, recording = recorded(sites={}, regions="aws12-2022", limit_s=0.5)
    draw_map(recording, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(PNG)


@needs_matplotlib
def test_a_comparison_is_drawn_with_intervals(tmp_path: Path, comparison: Comparison) -> None:
    pictures = draw_comparison(comparison, tmp_path)
    page = Page(comparison_report(comparison, pictures, ""))
    assert "finish-time" in page.words
    assert str(comparison.measures[1].ratio) in page.words
    assert len(page.loads) == 1


@needs_matplotlib
@pytest.mark.parametrize(
    "axes",
    [
        {"workload.train_s": [1, 5]},
        {"workload.train_s": [1, 5], "workload.delta_bytes": [1000, 20_000_000]},
        {"regions": ["aws12-2020", "aws12-2022"], "sites": [{}]},
    ],
    ids=["line", "map", "rows"],
)
def test_a_sweep_is_drawn(tmp_path: Path, axes: dict[str, list[object]]) -> None:
    swept = sweep(changed(steps=2), axes, placement="finish-time", seeds=[0])
    [picture] = draw_sweep(swept, tmp_path).values()
    assert picture.read_bytes().startswith(PNG)
    page = Page(sweep_report(swept, {}, ""))
    assert page.tags.count("tr") == len(swept.points) + 1


def test_without_matplotlib_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.picture_style.importlib.util.find_spec", lambda name: None)
    _, recording = recorded(steps=1)
    with pytest.raises(ConfigError, match=r"pip install 'farflow\[plots\]'"):
        draw_run(recording, tmp_path)


def test_importing_the_pictures_imports_no_matplotlib() -> None:
    import subprocess
    import sys

    code = (
        "import sys, sim.plots, sim.plots_compare, sim.report, sim.cli;"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_report_escapes_what_it_is_given() -> None:
    evil = "<script>alert('x')</script>"
    text = report(evil, evil, facts=[(evil, evil)], tables={evil: ([evil], [[evil]])}, source=evil)
    assert "<script" not in text
    assert Page(text).words.count(evil) == 9


def test_a_report_reads_in_light_and_dark() -> None:
    text = report("title", "about")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://", text)


# ---- the map -----------------------------------------------------------------------------------


def test_every_shipped_region_has_a_place() -> None:
    places = load_places().places
    for snapshot in ("aws12-2020", "aws12-2022"):
        assert set(load_regions(snapshot).sites) <= set(places)
    assert all(-90 <= lat <= 90 and -180 <= lon <= 180 for lat, lon in places.values())


def test_places_lie_on_land_or_at_its_coast() -> None:
    """Within two degrees of a coastline or inside of it: a swapped sign would not be."""
    rings = [list(zip(r[1::2], r[::2], strict=True)) for r in load_world().rings]

    def inside(lat: float, lon: float) -> bool:
        crossings = 0
        for ring in rings:
            for (y0, x0), (y1, x1) in zip(ring, [*ring[1:], ring[0]], strict=True):
                if (y0 > lat) != (y1 > lat) and lon < x0 + (lat - y0) / (y1 - y0) * (x1 - x0):
                    crossings += 1
        return crossings % 2 == 1

    for name, (lat, lon) in load_places().places.items():
        near = any(abs(y - lat) + abs(x - lon) < 3.0 for ring in rings for y, x in ring)
        assert inside(lat, lon) or near, name


def test_the_world_names_source_and_licence() -> None:
    world = load_world()
    assert "Natural Earth" in world.source
    assert world.licence == "public domain"
    assert all(len(ring) % 2 == 0 and len(ring) >= 8 for ring in world.rings)


def test_the_projection_is_equal_earth() -> None:
    """Against the formula's published extent: 2.7066 and 1.3173 radii (Savric et al., 2018)."""
    assert project(0.0, 180.0)[0] == pytest.approx(2.7066, abs=1e-3)
    assert project(90.0, 0.0)[1] == pytest.approx(1.3173, abs=1e-3)
    assert project(0.0, 0.0) == (0.0, 0.0)


def test_links_take_the_shorter_way_and_are_cut_at_the_edge() -> None:
    places = load_places().places
    across = arc(places["us-west-2"], places["ap-northeast-1"])
    assert len(across) == 2
    assert all(abs(lon) > 115 for part in across for _, lon in part)
    [straight] = arc(places["us-east-1"], places["eu-west-1"])
    assert straight[0] == pytest.approx(places["us-east-1"])
    assert straight[-1] == pytest.approx(places["eu-west-1"])
    assert max(lat for lat, _ in straight) < 80


def test_the_documents_pictures_are_there_and_small() -> None:
    docs = Path(__file__).parents[2] / "docs"
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (docs / "simulator.md").read_text())
    assert len(named) >= 2
    for name in named:
        data = (docs / name).read_bytes()
        assert data.startswith(PNG)
        assert len(data) < 150_000
