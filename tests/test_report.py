"""The report: figures and page from records, and the page in a real browser."""

import base64
import html
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

import macformer.report
from macformer.harness import record as records
from macformer.report import cells, figures, page
from scripts import report, table
from tests.conftest import ROOT
from tests.golden import tables as golden
from tests.made_up import make
from tests.unit.test_table import committed_records

SCRIPT = "<script>alert(1)</script>"
# Rows that are better, worse, and no better than a floor.
ACCURACY = {"transformer": 0.42, "rfa": 0.46, "macformer_exp": 0.43, "macformer_inv": 0.37, "macformer_sqrt": 0.31}
FLOORS = {"majority": 0.17, "length": 0.175, "root operator": 0.3}
NUMBERS = r"\.\d\d ± 0\.\d\d \(n=3\)"
RACED = ("transformer", "transformer_sdpa", "rfa", "macformer_exp")
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\".*?>")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def floors() -> list[dict[str, Any]]:
    of_any = golden.FLOORS[0] | {"dev_accuracy": FLOORS, "test_accuracy": FLOORS}
    return [of_any | {"task": task} for task in ("listops", "text")]


def bench() -> dict[str, Any]:
    """As results/bench/models.json, made up: the Transformers' time grows with the length."""

    def arms(growth: float) -> dict[str, Any]:
        seconds = {name: growth ** (i < 2) / (i + 1) for i, name in enumerate(RACED)}
        rounds = {name: [s, s * 1.1 ** (i + 1), s * 1.3] for i, (name, s) in enumerate(seconds.items())}
        return {name: {"seconds": rounds[name], "peak_bytes": int(1e8 * s)} for name, s in seconds.items()}

    crossing = {"model": "macformer_exp", "baseline": "transformer_sdpa", "n": 256.0, "low": 200.0, "high": 300.0}
    none = dict.fromkeys(crossing) | {"model": "rfa", "says": "rfa is slower at every length."}
    results = [{"n": 2**i, "arms": arms(2**i / 512)} for i in range(6, 13)]
    lengths = {"tokens": 8192, "results": results, "break_even": [crossing | {"says": "Even at 256."}, none]}
    return golden.BENCH | {"results": [golden.BENCH["results"][0] | {"arms": arms(2.0)}], "lengths": lengths}


def written(folder: Path) -> Path:
    """What `make report` does, with floors and a race that do not change with the committed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "floors", floors)
        patch.setattr(cells, "bench", bench)
        patch.setattr(sys, "argv", ["report.py", str(folder)])
        report.main()
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of no records at all."""
    return written(tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three seeds under the paper's protocol, a shortened one, stand-ins, a failure, a broken file."""
    folder = tmp_path_factory.mktemp("results")

    def put(words: str, accuracy: float = 0.4, seeds: int = 1, spread: float = 0.0, **known: Any) -> None:
        for seed in range(seeds):
            own = {"accuracy": accuracy + spread * math.sin(2 * seed), "seconds": 9.0 - seed / 9}
            record = make(f"{words} seed={seed}", **own, **known)
            record.message = "" if record.status == "ok" else f"{SCRIPT} & co."
            record.data.source = "stand-in" if record.task == "retrieval" else "generated"
            records.write(record, records.path(folder, record.config, record.run_id))

    for (model, accuracy), task in product(ACCURACY.items(), ("listops", "text")):
        put(f"{model} task={task}", accuracy, seeds=3, spread=0.01)
    for model in ("transformer", "rfa"):
        put(f"{model} trainer=cpu", 0.2)
    put("rfa model.attention.features=64", 0.44)
    put("rfa task=retrieval", 0.6)
    put("macformer_log", status="oom")
    (folder / "runs" / "broken.json").write_text("{")
    (folder / "figures").mkdir()
    for name in ("table2-9-bars-text.png", "table2-9-bars-text.svg", "table2-9.txt", "mine.png"):
        (folder / "figures" / name).write_text("old")
    return written(folder)


def texts(page: str) -> list[list[list[str]]]:
    """Of each table of a page, the texts of its rows."""

    def parts(of: str, tag: str) -> list[str]:
        return re.findall(rf"<(?:{tag})\b[^>]*>(.*?)</(?:{tag})>", of, re.DOTALL)

    tables = [[parts(row, "td|th") for row in parts(table, "tr")] for table in parts(page, "table")]
    return [[[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in rows] for rows in tables]


def values(page: str, attribute: str) -> list[str]:
    return [html.unescape(value) for value in re.findall(rf'<[^>]+\b{attribute}="([^"]*)"', page)]


def read(folder: Path) -> str:
    return (folder / "report.html").read_text()


def shows(folder: Path, name: str) -> set[str]:
    """The texts on a figure: matplotlib writes each as a comment before its outlines."""
    parts = html.unescape((folder / "figures" / f"{name}.svg").read_text()).replace("\n", " ").split("<!-- ")[1:]
    return {text.partition(" -->")[0] for text in parts}


def test_every_task_is_a_table_with_its_marks_and_floors(results: Path) -> None:
    text, listops, other, stand_in, shortened, _ = ([row[0] for row in table] for table in texts(read(results)))
    assert text == ["model", *cells.MODELS, *(f"floor: {floor}" for floor in FLOORS)]
    assert {"rfa (attention.features=64)", "transformer_sdpa"} <= set(listops)
    assert len(other) == 1 + len(cells.MODELS)
    assert (stand_in[-1], shortened[-1]) == ("floor: majority", "floor: root operator")
    found = read(results)
    assert re.search(rf"<td><strong>46{NUMBERS}</strong></td>", found)
    assert re.search(rf"<td><em>37{NUMBERS}</em></td>", found)
    assert re.search(rf'<td class="dagger"><em>31{NUMBERS}</em> †</td>', found)
    assert "retrieval on STAND-IN data" in found
    assert "trainer steps = 2000 (paper: 10000)" in found


def test_every_record_is_listed_and_every_link_leads_somewhere(results: Path) -> None:
    page = read(results)
    for link in values(page, "href"):
        assert link[1:] in values(page, "id") if link[0] == "#" else (results / unquote(link)).is_file(), link
    listed = {row[0]: row for row in texts(page)[-1][1:]}
    assert set(listed) == {file.stem for file in (results / "runs").rglob("*.*.json")}
    (failed,) = (row for name, row in listed.items() if name.startswith("listops.macformer_log"))
    assert failed[1:4] == ["-", "0", "oom"]
    (shortened,) = (row for row in listed.values() if row[0].startswith("retrieval"))
    assert shortened[1:5] == ["2", "0", "ok", "60.00"]


def test_texts_from_records_are_escaped_and_nothing_is_loaded_from_elsewhere(results: Path) -> None:
    text = read(results)
    assert "ended as oom: &lt;script&gt;alert(1)&lt;/script&gt; &amp; co." in text
    assert "<script" not in text
    assert "broken.json is not a run record" in text
    assert POLICY.search(text)
    sources = values(text, "src")
    assert len(sources) == len(list((results / "figures").glob("table2-*.svg")))
    for source in sources:
        svg = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,"), validate=True).decode()
        assert not re.findall(r"(?:href|src)=\"[^#]|url\([^#]", svg)
        assert "http" not in re.sub(r"xmlns(:\w+)?=\"[^\"]+\"|<!DOCTYPE[^>]+>", "", svg)
    assert not re.findall(r"https?:|url\(|@import|<link", re.sub(r"src=\"[^\"]+\"", "", text))


def test_figures_say_what_they_show(results: Path) -> None:
    kept = {file.name for file in (results / "figures").iterdir() if file.read_bytes() == b"old"}
    assert kept == {"table2-9.txt", "mine.png"}  # figures of former tables go, other files stay
    names = {file.stem for file in (results / "figures").glob("*.*")} - {"table2-9", "mine"}
    of_tables = {1: ("curves-text", "curves-listops", "bars-text", "bars-listops", "bars-retrieval", "accuracy-time")}
    of_tables |= {2: ("curves-retrieval", "bars-retrieval", "accuracy-time")}
    of_tables |= {3: ("curves-listops", "bars-listops", "accuracy-time")}
    assert names == {"table2-lengths", *(f"table2-{n}-{kind}" for n, kinds in of_tables.items() for kind in kinds)}
    changed, stand_in = "(NOT the paper's protocol)", "(STAND-IN data, NOT the paper's protocol)"
    for kind, title in (("curves", "Learning curves on {}"), ("bars", "Time and memory on {}")):
        assert title.format("listops") in shows(results, f"table2-1-{kind}-listops")
        assert f"{title.format('retrieval')} {stand_in}" in shows(results, f"table2-2-{kind}-retrieval")
        assert f"{title.format('listops')} {changed}" in shows(results, f"table2-3-{kind}-listops")
    curves = shows(results, "table2-1-curves-listops")
    assert {"rfa (n=3)", "rfa (attention.features=64) (n=1)", *(f"floor: {floor}" for floor in FLOORS)} <= curves
    # The Transformer's own; rfa: ours, raced, the paper's.
    assert {"1.00", "0.17", "0.84", "transformer_sdpa"} <= shows(results, "table2-1-bars-listops")
    assert "break-even: macformer_exp and transformer_sdpa, n = 256" in shows(results, "table2-lengths")
    assert "rfa is slower at every length." in read(results)


def test_figures_follow_the_numbers(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval, a spread, a floor or a point of a curve that moves changes the picture that shows it."""

    def saved(name: str, figure: Figure, title: str, caption: str) -> figures.Drawn:
        """The picture, without the time that PNG and SVG take."""
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return figures.Drawn(name, title, caption, bytes(canvas.buffer_rgba()), b"")

    def pixels() -> dict[str, bytes]:
        return {figure.name.split("-")[2]: figure.png for figure in figures.draw(1, table)}

    def followed(numbers: dict[str, Any], name: str, value: Any) -> set[str]:
        """The kinds of figures that another value changes."""
        old, numbers[name] = numbers[name], value
        after, numbers[name] = pixels(), old
        return {kind for kind in before if before[kind] != after[kind]}

    monkeypatch.setattr(figures, "saved", saved)
    (table, *_) = cells.tables(cells.load(results)[0], floors(), bench())
    (column,) = table.columns = [column for column in table.columns if column.task == "listops"]
    cell = column.cells["rfa"]
    before = pixels()
    accuracy, time, raced = cell.ours["accuracy"], cell.ours["time"], cell.raced["time"]
    assert followed(cell.ours, "accuracy", replace(accuracy, low=accuracy.low - 0.01)) == {"accuracy"}
    assert followed(cell.ours, "accuracy", replace(accuracy)) == set()
    assert followed(cell.ours, "time", replace(time, spread=0.3)) == {"accuracy"}
    assert followed(cell.ours, "time", replace(time, high=1.3 * time.high)) == {"bars"}
    assert followed(column.floors, "test_accuracy", {"majority": 0.5}) == {"accuracy"}
    assert followed(column.floors, "dev_accuracy", {"majority": 0.5}) == {"curves"}
    assert followed(vars(cell.runs[0].history[5]), "dev_accuracy", 0.9) == {"curves"}
    slower = replace(raced, value=(raced.value + raced.high) / 2)
    assert followed(cell.raced, "time", slower) == {"bars"}
    del cell.ours["time"]  # without runs of the Transformer the point stands at the raced time
    before = pixels()
    assert followed(cell.raced, "time", slower) == {"bars", "accuracy"}


def test_models_of_ones_own_have_colours_of_their_own() -> None:
    looks = figures._looks({"mine": "mine", "rfa": "rfa", "another": "another", "another (x=1)": "another"})
    assert [len({look[part] for look in looks.values()}) for part in ("color", "marker", "ls")] == [3, 4, 2]
    assert looks["another"]["color"] == looks["another (x=1)"]["color"]
    assert figures._looks({name: name for name in ("another", "mine")}) == {n: looks[n] for n in ("another", "mine")}


def test_the_same_records_give_the_same_bytes(results: Path) -> None:
    tables = cells.tables(cells.load(results)[0], floors(), bench())
    for figure in (*figures.draw(3, tables[2]), figures.over_length(bench())):
        file = results / "figures" / figure.name
        assert [file.with_suffix(kind).read_bytes() for kind in (".png", ".svg")] == [figure.png, figure.svg]


def test_without_runs_there_are_the_papers_values_the_race_and_the_commands(empty: Path) -> None:
    page = read(empty)
    text, tables = html.unescape(page), texts(page)
    assert "Table 2, the paper's protocol: no runs yet" in text
    assert "There are none yet." in text
    assert [len(table) for table in tables] == [11, 12, 8]
    assert ["transformer_sdpa", "0.500"] in [[row[0], row[6]] for row in tables[1]]
    for task in cells.TASKS:
        assert f"task={task} seed=0,1,2</code>" in text
        assert f"Time and memory on {task} (no runs yet)" in shows(empty, f"table2-1-bars-{task}")
    assert not list((empty / "figures").glob("*curves*"))
    assert {"0.84", "0.17", "the paper's"} <= shows(empty, "table2-1-bars-listops")


@pytest.mark.parametrize("script", [table, report])
def test_a_folder_that_is_not_there_is_one_sentence(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "nosuch"])
    with pytest.raises(SystemExit, match=r"^error: nosuch is not there: give the folder that has runs/ in it$"):
        script.main()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_one_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("figures", "page"):  # as if nobody had imported them
        monkeypatch.delitem(sys.modules, f"macformer.report.{name}")
        monkeypatch.delattr(macformer.report, name)
    said = rf"^error: {package} is not there; pip install 'macformer\[figures\]' \(make setup does\)$"
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(ROOT / "scripts" / "report.py"))


def test_table_and_report_need_neither_torch_nor_hydra() -> None:
    code = (
        "import sys; from macformer.report import cells, figures, page, table; "
        "table.markdown(cells.tables([], [], None), [], []); "
        "assert not {'torch', 'hydra', 'omegaconf', 'lra_data', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_committed_page_is_the_one_that_the_records_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its figures: their bytes depend on the fonts and the matplotlib of the machine that drew them."""
    monkeypatch.setattr(Figure, "savefig", lambda *arguments, **options: None)
    found, race = committed_records(), cells.bench()
    tables = cells.tables(found, cells.floors(), race, papers=True)
    drawn = [figures.draw(number, each) for number, each in enumerate(tables, 1)]
    text = page.render(tables, drawn, figures.over_length(race), found, [])
    committed, made = (re.sub(r"src=\"data:[^\"]+\"", "", each) for each in (read(ROOT / "results"), text))
    assert committed == made, "run `make report` and commit its results"


Browse = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """browse(text) -> the page as the browser has it in the end, and what it wrote to its console."""
    if not CHROMIUM:
        pytest.skip("no browser: neither chromium nor chromium-browser is on the PATH (Debian: apt install chromium)")

    def run(text: str, *flags: str) -> tuple[str, list[str]]:
        file = tmp_path / "page.html"
        file.write_text(text)
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        command += ["--enable-logging=stderr", "--v=0", *flags, file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout, re.findall(r"CONSOLE[:(].*", done.stderr)  # errors, warnings, and refused loads

    return run


def test_a_browser_shows_the_tables_and_complains_of_nothing(browse: Browse, results: Path, empty: Path) -> None:
    for text in map(read, (results, empty)):
        shown, complaints = browse(text, "--dump-dom")
        assert complaints == []
        assert texts(shown) == texts(text)


def test_a_complaint_of_the_browser_is_seen(browse: Browse, empty: Path) -> None:
    """The policy refuses scripts and loads, and says so; without it, the script speaks for itself."""
    script, image = "<script>console.error('planted')</script>", "<img src='http://127.0.0.1:9/x.png'>"
    for planted in (script, image):
        _, complaints = browse(read(empty).replace("</body>", f"{planted}</body>"), "--dump-dom")
        assert [line for line in complaints if "Content Security Policy" in line]
    _, complaints = browse(POLICY.sub("", read(empty)).replace("</body>", f"{script}</body>"), "--dump-dom")
    assert len(complaints) == 1
    assert "planted" in complaints[0]


def test_a_browser_draws_every_figure_and_nothing_is_wider_than_a_narrow_window(browse: Browse, results: Path) -> None:
    """A script of the test looks. The last image is broken and the last box too wide, to see that it can tell."""
    look = """<script>addEventListener('load', () => {
      const widths = () => [document.documentElement.scrollWidth, document.documentElement.clientWidth];
      const seen = {images: [...document.images].map(image => image.naturalWidth), before: widths()};
      document.body.insertAdjacentHTML('beforeend', '<div style="width: 2000px">wide</div>');
      seen.after = widths();
      document.title = JSON.stringify(seen);
    })</script>"""
    text = POLICY.sub("", read(results)).replace("</body>", f"<img src='data:image/svg+xml,broken'>{look}</body>")
    shown, _ = browse(text, "--dump-dom", "--window-size=500,900")
    title = re.search(r"<title>(.+?)</title>", shown)
    assert title
    seen = json.loads(html.unescape(title[1]))
    *drawn, broken = seen["images"]
    assert len(drawn) == len(list((results / "figures").glob("table2-*.svg")))
    assert min(drawn) > 300
    assert broken == 0
    assert seen["before"][0] == seen["before"][1] <= 500
    assert seen["after"][0] > seen["after"][1]


@pytest.mark.parametrize(("scheme", "background"), [(1, (1.0, 1.0)), (0, (0.0, 0.2))])
def test_a_browser_paints_the_page_light_or_dark(
    scheme: int, background: tuple[float, float], browse: Browse, results: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "page.png"
    size = ("--window-size=1280,3000", "--hide-scrollbars")
    browse(read(results), f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}", *size)
    pixels = imread(picture)[..., :3]
    assert pixels.shape == (3000, 1280, 3)
    low, high = background
    assert ((low <= pixels[:, 0]) & (pixels[:, 0] <= high)).all()  # the margin
    rows = (pixels != pixels[0, 0]).any(2).any(1)
    assert rows.mean() > 0.5  # most lines have something on them
    assert (pixels[:, 100:900] == 1).all(2).mean(1).max() > 0.9  # figures are on white in both
