"""The page to explore tokens, and the map as a file for other tools."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from transformers import AutoTokenizer

from coupled_adam.cli import main
from coupled_adam.embeddings import load_embeddings, row_norms
from lab.browser import needs_browser

pytest.importorskip("plotly")

EVIL = "</script><script>document.title='evil'</script><b>&amp;"

# What a user would do; what he would see then becomes the title.
PROBE = """<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const found = {};
ready.then(async () => {
  const column = (n) => [...document.querySelectorAll(`#tokens tbody td:nth-child(${n})`)];
  const cells = (n) => column(n).map((cell) => cell.textContent);
  const map = document.getElementById("map"), search = document.getElementById("search");
  found.all = cells(1).length;
  search.value = "%s"; search.dispatchEvent(new Event("input")); await wait(500);
  found.searched = cells(2); found.about = document.querySelector("#about h2").textContent;
  const near = document.querySelector("#about tr[tabindex]");
  found.nearest = near.cells[0].textContent; near.click();
  found.followed = document.querySelector("#about h2").textContent;
  search.value = ""; search.dispatchEvent(new Event("input")); await wait(500);
  const head = (n) => document.querySelectorAll("#tokens th button")[n];
  head(%d).click(); found.up = cells(%d + 1); head(%d).click(); found.down = cells(%d + 1);
  const colour = document.getElementById("colour");
  found.colours = [...colour.options].map((o) => o.value);
  colour.value = "category"; colour.onchange();
  found.legend = document.getElementById("legend").textContent;
  await wait(300);
  const { xaxis: x, yaxis: y } = map._fullLayout, box = map.getBoundingClientRect();
  const left = box.left + x._offset + x.l2p(map.data[0].x[7]);
  const top = box.top + y._offset + y.l2p(map.data[0].y[7]);
  const at = { clientX: left, clientY: top, bubbles: true };
  const drag = map.querySelector(".nsewdrag");
  for (const kind of ["mouseover", "mousemove"]) drag.dispatchEvent(new MouseEvent(kind, at));
  await wait(500);
  const tip = document.getElementById("tip");
  found.hover = tip.textContent; found.hidden = tip.hidden;
  found.fits = document.documentElement.scrollWidth <= innerWidth;
  const resources = performance.getEntriesByType("resource");
  found.fetched = resources.filter((entry) => /^(http|file)/.test(entry.name)).length;
}).catch((error) => { found.error = String(error); })
  .finally(() => { document.title = JSON.stringify(found); });
</script></body>"""


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory):
    """The page of an untied model with counts, one of whose tokens is an attack."""
    folder = tmp_path_factory.mktemp("explorer")
    shutil.copytree(trained[0], folder / "run")
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
    file = folder / "run" / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    piece = tokenizer.convert_ids_to_tokens(300)
    vocabulary = content["model"]["vocab"]
    vocabulary[EVIL] = vocabulary.pop(piece)
    merges = content["model"]["merges"]
    content["model"]["merges"] = [m for m in merges if "".join(m) in vocabulary and piece not in m]
    file.write_text(json.dumps(content))
    arguments = ["--explore", folder / "page.html", "--parquet", folder / "map.parquet"]
    assert main(["analyze", str(folder / "run"), *map(str, arguments), "--device", "cpu"]) == 0
    return folder


def test_the_page_is_whole_and_harmless(page):
    text = (page / "page.html").read_text()
    assert len(text) < 3_000_000
    assert "http-equiv" in text
    assert "default-src 'none'" in html.unescape(text)
    assert EVIL not in text
    scripts = re.findall(r"<script[^>]*>", text)
    assert len(scripts) == 3
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [part["label"] for part in data["maps"]] == ["run, input", "run, output"]
    assert repr(EVIL) in data["maps"][0]["tokens"]


def test_a_sample_has_no_dead_rows(tmp_path, monkeypatch):
    """A row of zeros is under-trained, but has no place on a map and no neighbours."""
    monkeypatch.setattr("coupled_adam.embeddings.explorer.POINTS", 60)
    matrix = np.random.default_rng(0).normal(size=(300, 8))
    matrix[5], matrix[7] = 0, np.nan
    np.save(tmp_path / "matrix.npy", matrix)
    arguments = ["--device", "cpu", "--explore", str(tmp_path / "page.html")]
    assert main(["analyze", str(tmp_path / "matrix.npy"), *arguments]) == 0
    text = (tmp_path / "page.html").read_text()
    (part,) = json.loads(text.partition('id="data">')[2].partition("</script>")[0])["maps"]
    assert (part["total"], len(part["tokens"])) == (300, 60)
    assert not {"#5", "#7"} & {*part["tokens"]}


def test_the_map_as_parquet(page):
    """All tokens of both matrices, with the coordinates of principal components."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(page / "map.parquet").to_pydict()
    assert {"model", "role", "id", "token", "category", "x", "y", "count", "norm"} <= {*table}
    entries = load_embeddings(page / "run")
    assert len(table["id"]) == sum(len(entry.matrix) for entry in entries)
    matrix = entries[0].matrix.double().numpy()
    first = np.array(table["role"]) == "input"
    assert np.array(table["norm"])[first] == pytest.approx(row_norms(matrix))
    centred = matrix - matrix.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    for name, axis in zip("xy", axes):
        expected = centred @ (axis * np.sign(axis[np.abs(axis).argmax()]))
        assert np.array(table[name])[first] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("size", ["1280,900", "400,800"])
def test_the_page_in_a_browser(page, tmp_path, size):
    """Search, sort, neighbours, colours and hover, as a user would use them."""
    heads = ["id", "token", "category", "count", "norm"]
    norm = heads.index("norm")
    probe = PROBE % ("the", norm, norm, norm, norm)
    file = tmp_path / "page.html"
    file.write_text((page / "page.html").read_text().replace("</body>", probe))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-dev-shm-usage"]
    command += ["--enable-unsafe-swiftshader", "--use-angle=swiftshader"]
    command += ["--dump-dom", "--virtual-time-budget=20000", f"--window-size={size}"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    found = json.loads(html.unescape(dump.partition("<title>")[2].partition("</title>")[0]))
    assert "error" not in found, found["error"]
    assert found["all"] == 200
    assert found["searched"]
    assert all("the" in token.lower() for token in found["searched"])
    assert found["about"] == found["searched"][0]
    assert found["about"].strip("' ").lower() == "the"  # not one that only contains it
    assert found["followed"] == found["nearest"] != found["about"]
    up, down = ([float(value) for value in found[way]] for way in ("up", "down"))
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert down[0] > up[-1]
    assert found["colours"] == ["count", "norm", "indicator", "hub", "category", "model"]
    assert "ok" in found["legend"]
    assert not found["hidden"]
    assert [line.split(" ")[0] for line in found["hover"].splitlines()[-3:]] == [
        "id",
        "count",
        "norm",
    ]
    assert found["fits"]
    assert found["fetched"] == 0
