"""The sources that a recipe names: texts, token files, and data sets as the hub has them."""

import dataclasses
import http.server
import shutil
from pydoc_data.topics import topics

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from coupled_adam.errors import UsageError
from coupled_adam.lab.data.source import find_token_files, open_source
from coupled_adam.lab.sections import Data
from coupled_adam.text.token_files import Tokens
from servers import serving, use_hub
from text.test_token_files import ids, write_llm_c


@pytest.fixture
def texts():
    return sorted(topics.values(), key=len)[-12:]


def read(data, split="train"):
    return list(open_source(data, 300).documents[split])


@pytest.fixture
def hub_folder(texts, tmp_path):
    """A data set as a clone of a hub's repository has it: a README beside the data."""
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    for split, documents in (("train", texts), ("validation", texts[:2]), ("test", texts[2:4])):
        parquet.write_table(pa.table({"text": documents}), folder / "data" / f"{split}-0.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        + "".join(
            f"  - {{split: {split}, path: data/{split}-*}}\n"
            for split in ("train", "validation", "test")
        )
        + "---\nA data set.\n"
    )
    return folder


def test_hub_folder(hub_folder, texts, monkeypatch):
    # The library waits five seconds for its threads after each shuffled reading.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    data = Data(hub=str(hub_folder), valid_split="validation")
    source = open_source(data, 300)
    assert list(source.documents) == ["train", "valid"]
    assert read(data) == texts
    assert read(data, "valid") == texts[:2]
    shuffled = [read(Data(hub=str(hub_folder), shuffle_seed=seed)) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == sorted(shuffled[2]) == sorted(texts)
    parquet.write_table(pa.table({"text": texts[5:]}), hub_folder / "data" / "train-0.parquet")
    assert open_source(data, 300).fingerprint != source.fingerprint


def test_a_hub_folder_is_all_that_is_read(tmp_path):
    """A hidden file that its README names counts, and a file that is elsewhere is refused."""
    folder = tmp_path / "dataset"
    for name in ("dataset/.hidden/a.jsonl", "elsewhere/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text('{"text": "before"}\n')

    def fingerprint(name):
        files = f"configs: [{{config_name: default, data_files: [{{split: train, path: {name}}}]}}]"
        (folder / "README.md").write_text(f"---\n{files}\n---\n")
        return open_source(Data(hub=str(folder)), 300).fingerprint

    before = fingerprint(".hidden/a.jsonl")
    assert fingerprint(".hidden/a.jsonl") == before
    (folder / ".hidden" / "a.jsonl").write_text('{"text": "behind"}\n')
    assert fingerprint(".hidden/a.jsonl") != before
    for name in ("../elsewhere/a.jsonl", tmp_path / "elsewhere" / "a.jsonl"):
        with pytest.raises(UsageError, match=r"names a file outside of it, .*elsewhere/a\.json"):
            fingerprint(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "trian"}, 'Unknown split "trian"|Bad split: trian'),
        ({"column": "txt"}, "column='txt' is not among its columns: did you mean text"),
        ({"hub_config": "other"}, "other"),
    ],
    ids=str,
)
def test_hub_errors(options, message, hub_folder):
    with pytest.raises(UsageError, match=message) as caught:
        read(Data(hub=str(hub_folder), **options))
    assert str(caught.value).startswith(f"data.hub={hub_folder}")
    assert "\n" not in str(caught.value)


def test_a_data_set_of_a_script(tmp_path):
    """Which ``datasets`` has not run since its version 4."""
    folder = tmp_path / "mytext"  # a script has the name of its data set
    folder.mkdir()
    (folder / "mytext.py").write_text("raise SystemExit('this must not be run')\n")
    data = Data(hub=str(folder), hub_otherwise="take the other one")
    with pytest.raises(UsageError, match=r"a script makes its text.*Otherwise, take the other one"):
        read(data)


def test_a_part_is_not_taken_for_the_whole(tmp_path, texts):
    """The hub's own copies in Parquet end at 5 GB, in folders of such names."""
    (part := tmp_path / "plain_text" / "partial-train").mkdir(parents=True)
    parquet.write_table(pa.table({"text": [*texts, " "]}), part / "0000.parquet")
    with pytest.warns(UserWarning, match="only a part of it, in the folder partial-train"):
        assert read(Data(hub=str(tmp_path))) == texts
    with pytest.raises(UsageError, match=r"only a part of it.*--data.hub_documents null"):
        next(open_source(Data(hub=str(tmp_path), hub_documents=99), 300).documents["train"])
    # A recipe that needs fewer tokens may find enough of them in a part.
    few = Data(hub=str(tmp_path), hub_documents=99, max_tokens=10)
    assert next(open_source(few, 300).documents["train"]) == texts[0]
    with pytest.raises(UsageError, match=f"it has {len(texts) + 1} documents of 99"):
        read(few)
    assert read(dataclasses.replace(few, hub_documents=len(texts) + 1)) == texts


class NothingThere(http.server.BaseHTTPRequestHandler):
    """A hub on which nothing is found: neither a data set nor, of "me/there", the revision."""

    def do_GET(self):
        self.send_response(404)
        code = "RevisionNotFound" if "/me/there" in self.path else "RepoNotFound"
        self.send_header("X-Error-Code", code)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [("me/there", "not this revision"), ("me/gone", "nothing of this name on the hub")],
)
def test_what_the_hub_does_not_have(name, reason, tmp_path, monkeypatch):
    with serving(NothingThere) as endpoint:
        use_hub(monkeypatch, endpoint, tmp_path)
        with pytest.raises(UsageError, match=f"{reason}.*--text FILE") as caught:
            read(Data(hub=name))
    assert "\n" not in str(caught.value)


def test_without_the_hub(tmp_path, monkeypatch):
    """What its own cache notes is found offline by its commit: a corpus, by what it is made of."""
    use_hub(monkeypatch, None, tmp_path)
    for dataset, commit in (("one", "1" * 40), ("two", "2" * 40)):
        cache = tmp_path / f"datasets--me--{dataset}"
        for folder in ("refs", f"snapshots/{commit}"):
            (cache / folder).mkdir(parents=True)
        (cache / "refs" / "main").write_text(commit)
    one, two = (open_source(Data(hub=f"me/{name}"), 300).fingerprint for name in ("one", "two"))
    assert one != two
    shutil.rmtree(tmp_path / "datasets--me--two" / "refs")
    for name in ("me/two", "nobody/nothing"):
        with pytest.raises(UsageError, match=rf"^data\.hub={name} cannot be read \(.*$"):
            read(Data(hub=name))


def token_splits(data, vocab_size=300):
    files = open_source(data, vocab_size).files
    return {split: Tokens(parts) for split, parts in files.items()}


def test_llm_c(tmp_path):
    """Several files for a split, in the order of their names; test files of their own."""
    parts = [ids(100 + i, seed=i) for i in range(3)]
    for i in (2, 0, 1):
        write_llm_c(tmp_path / f"fineweb_train_{i:06}.bin", parts[i])
    write_llm_c(tmp_path / "fineweb_val_000000.bin", parts[1])
    write_llm_c(tmp_path / "fineweb_test_000000.bin", parts[2])
    splits = token_splits(Data(tokens=str(tmp_path)))
    np.testing.assert_array_equal(splits["train"][:], np.concatenate(parts))
    np.testing.assert_array_equal(splits["train"][90:310], np.concatenate(parts)[90:310])
    np.testing.assert_array_equal(splits["valid"][:], parts[1])
    np.testing.assert_array_equal(splits["test"][:], parts[2])


def test_limits(tmp_path):
    """No more tokens than asked for, over several files."""
    parts = [ids(100, seed=i) for i in range(3)]
    for i, part in enumerate(parts):
        part.tofile(tmp_path / f"train{i}.bin")
    ids(500).tofile(tmp_path / "val.bin")
    splits = token_splits(Data(tokens=str(tmp_path), max_tokens=150, max_held_out_tokens=40))
    np.testing.assert_array_equal(splits["train"][:], np.concatenate(parts)[:150])
    np.testing.assert_array_equal(splits["valid"][:], ids(500)[:40])
    np.testing.assert_array_equal(splits["test"][:], ids(500)[250:290])


NAMES = {
    "pretrain_{}.bin": True,
    "retrieval_{}.bin": True,
    "latest-{}-0001.bin": True,
    "{}.bin": True,
    "data.{}.01.bin": True,
    "Evaluation_{}.bin": True,
    "{}ing.bin": False,
    "pre{}.bin": False,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("valid", ["val", "valid", "validation"])
def test_the_word_of_a_split_stands_alone(name, valid, tmp_path):
    """In names that contain one as a part of another word, as those of public projects do."""
    for number, word in enumerate(("train", valid), 1):
        ids(100 * number).tofile(tmp_path / name.format(word))
    if not NAMES[name]:
        with pytest.raises(UsageError, match="no file with the word"):
            find_token_files(Data(tokens=str(tmp_path)), 300)
        return
    splits = find_token_files(Data(tokens=str(tmp_path)), 300)
    lengths = {split: sum(file.length for file in files) for split, files in splits.items()}
    assert lengths == {"train": 100, "valid": 100, "test": 100}
    ids(50).tofile(tmp_path / f"train_{valid}.bin")
    with pytest.raises(UsageError, match=f"train_{valid}.bin is named after two splits"):
        find_token_files(Data(tokens=str(tmp_path)), 300)


@pytest.mark.parametrize("save", [np.save, lambda path, ids: ids.tofile(path)])
def test_token_files_that_end_in_npy(save, tmp_path):
    """NumPy's own format, and the bare ids that OLMo gives this name; .bin files come first."""
    for number, name in enumerate(("train-0", "train-1", "val"), 1):
        save(tmp_path / f"{name}.npy", ids(100 * number))
    splits = find_token_files(Data(tokens=str(tmp_path)), 300)
    assert [file.length for file in splits["train"]] == [100, 200]
    np.testing.assert_array_equal(Tokens(splits["train"])[100:], ids(200))
    for name in ("train", "val"):
        ids(10).tofile(tmp_path / f"{name}.bin")
    splits = find_token_files(Data(tokens=str(tmp_path)), 300)
    assert [file.length for file in splits["train"]] == [10]


def test_missing_token_files(tmp_path):
    def refuses(message, folder=tmp_path):
        with pytest.raises(UsageError, match=rf"^data\.tokens={folder}.*{message}"):
            open_source(Data(tokens=str(folder)), 300)

    refuses("no such folder", tmp_path / "missing")
    refuses(r"no file with the word train in its name")
    ids(100).tofile(tmp_path / "train.bin")
    refuses(r"no file with the word val in its name")
    ids(100, "<u4").tofile(tmp_path / "val.bin")
    refuses("val.bin: every second number is 0")
