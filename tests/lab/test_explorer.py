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
from coupled_adam.embeddings import explorer, load_embeddings, row_norms
from coupled_adam.embeddings.analysis import analyze_model
from coupled_adam.embeddings.analysis_inputs import AnalysisInputs
from coupled_adam.embeddings.undertrained import find_undertrained
from lab.browser import needs_browser

pytest.importorskip("plotly")

EVIL = "</script><script>document.title='evil'</script><b>&amp;"


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
    arguments = ["--explore", folder / "page.html", "--export", folder / "map.parquet"]
    assert main(["analyze", str(folder / "run"), *map(str, arguments), "--device", "cpu"]) == 0
    return folder


def test_the_page_is_whole_and_harmless(page):
    """It loads nothing, and no text of the model is HTML in it."""
    text = (page / "page.html").read_text()
    assert len(text) < 8_000_000
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text)
    assert "default-src 'none'" in text
    assert 'type="search"' in text
    assert "<h1>Tokens: run, input, run, output</h1>" in text
    assert str(page) not in text.partition("Plotly.newPlot(")[0]  # names are short
    assert EVIL not in text
    assert "<b>&amp;" not in text
    # As plotly decodes it, it is shown as it is written.
    figure = text.rpartition("Plotly.newPlot(")[2]
    assert r"\u0026lt;\u002fscript\u0026gt;" in figure or r"&lt;\u002fscript&gt;" in figure
    assert all(f"<h2>run, {role}</h2>" in text for role in ("input", "output"))


def test_a_sample_has_no_dead_rows(tmp_path):
    """A row of zeros is under-trained, but has no place on a map and no neighbours."""
    matrix = np.random.default_rng(0).normal(size=(300, 8))
    matrix[5], matrix[7] = 0, np.nan
    np.save(tmp_path / "matrix.npy", matrix)
    (analysis,) = analyze_model(str(tmp_path / "matrix.npy"), AnalysisInputs())
    frame = explorer.token_frame([find_undertrained(analysis)], limit=60)
    assert len(frame) == 60
    assert not {5, 7} & {*frame["id"]}
    near = frame["neighbors"][7]
    assert len(near["ids"]) == 10
    here = matrix[frame["id"]] - np.nanmean(np.delete(matrix, [5, 7], 0), 0)
    units = here / np.linalg.norm(here, axis=1, keepdims=True)
    cosines = np.delete(units @ units[7], 7)
    assert near["distances"] == pytest.approx(1 - np.sort(cosines)[:-11:-1], abs=1e-5)


def test_the_export_as_parquet(page):
    """All tokens of both matrices, with the coordinates of principal components, and neighbours."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(page / "map.parquet").to_pydict()
    assert {"model", "role", "id", "token", "category", "x", "y", "count", "norm"} <= {*table}
    entries = load_embeddings(page / "run")
    assert len(table["id"]) == sum(len(entry.matrix) for entry in entries)
    matrix = entries[0].matrix.double().numpy()
    first = np.array(table["role"]) == "input"
    assert np.array(table["norm"])[first] == pytest.approx(row_norms(matrix))
    centered = matrix - matrix.mean(0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    for name, axis in zip("xy", axes):
        expected = centered @ (axis * np.sign(axis[np.abs(axis).argmax()]))
        assert np.array(table[name])[first] == pytest.approx(expected, abs=1e-6)
    # The neighbours of the second matrix are rows of the table that belong to it.
    last = table["neighbors"][-1]["ids"]
    assert all(not first[row] for row in last)


def test_a_model_that_is_named_twice(tmp_path, monkeypatch):
    """Has two maps, with its tokens once in each."""
    np.save(tmp_path / "matrix.npy", np.random.default_rng(0).normal(size=(30, 4)))
    (analysis,) = analyze_model(str(tmp_path / "matrix.npy"), AnalysisInputs())
    points = []
    monkeypatch.setattr(explorer, "_map", lambda frame, _: points.append(len(frame)) or "")
    explorer.explorer_page([find_undertrained(analysis)] * 2)
    assert points == [30, 30]


@pytest.mark.slow
@needs_browser
def test_the_map_is_drawn(page, tmp_path):
    """By a browser, without an error and without loading anything."""
    probe = """<script>
const seen = {};
new Promise((done) => setTimeout(done, 3000)).then(() => {
  const maps = [...document.querySelectorAll(".js-plotly-plot")];
  seen.points = maps.reduce((sum, map) => sum + map._fullData[0]._length, 0);
  seen.wide = document.documentElement.scrollWidth > innerWidth;
  const field = document.getElementById("search");
  field.value = maps[0].data[0].hovertext[5].slice(0, 3);
  field.dispatchEvent(new Event("input"));
  seen.hits = document.getElementById("hits").textContent;
  seen.selected = maps[0].data[0].selectedpoints.includes(5);
  const resources = performance.getEntriesByType("resource");
  seen.fetched = resources.filter((entry) => /^(http|file)/.test(entry.name)).length;
}).catch((error) => { seen.error = String(error); })
  .finally(() => { document.title = JSON.stringify(seen); });
</script></body>"""
    file = tmp_path / "page.html"
    before, _, after = (page / "page.html").read_text().rpartition("</body>")
    file.write_text(before + probe + after)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-dev-shm-usage"]
    command += ["--enable-unsafe-swiftshader", "--use-angle=swiftshader"]
    command += ["--window-size=400,900", "--dump-dom", "--virtual-time-budget=20000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    seen = json.loads(html.unescape(dump.partition("<title>")[2].partition("</title>")[0]))
    assert "error" not in seen, seen["error"]
    assert seen["fetched"] == 0
    assert not seen["wide"]
    assert seen["selected"]
    assert re.fullmatch(r"[1-9]\d* tokens", seen["hits"])
    assert seen["points"] == sum(len(entry.matrix) for entry in load_embeddings(page / "run"))
