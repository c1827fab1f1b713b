"""Text -> passages -> tokenizer and token files on disk."""

import ast
import dataclasses
import hashlib
import json
import lzma
import shutil
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from coupled_adam.embeddings import unigram_counts
from coupled_adam.lab import UsageError

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe

END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "valid", "test")
_TEXT_FILES = (".txt", ".md", ".rst")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A prepared corpus: a folder with ``tokenizer/``, token files ``train.bin`` ..., and facts.

    The token files are bare little-endian arrays, uint16 or uint32, as nanoGPT's.
    """

    folder: Path
    facts: dict[str, Any]

    def tokens(self, split: str) -> NDArray[Any]:
        """The token ids of ``"train"``, ``"valid"`` or ``"test"``, memory-mapped."""
        return np.memmap(self.folder / f"{split}.bin", dtype=self.facts["dtype"], mode="r")

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer in Hugging Face format."""
        return self.folder / "tokenizer"

    def unigram_counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the training split, [V]."""
        return unigram_counts(self.tokens("train"), self.facts["vocab_size"])


def prepare_corpus(recipe: "Recipe", folder: Path) -> Corpus:
    """Tokenise the recipe's text into ``folder``, or find it there, made from the same text.

    The splits are made by passage, from its hash: the same passage is always in the same split. The
    byte-level BPE is trained on the training split alone. The folder appears whole or not at all.

    Raises:
        UsageError: text that is missing, unreadable, or too short for the recipe.
    """
    data, training, vocab_size = recipe.data, recipe.training, recipe.model.vocab_size
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    digest = hashlib.sha256()
    for passage in python_documentation() if data.text is None else text_files(Path(data.text)):
        key = hashlib.sha256(passage.encode()).digest()
        digest.update(key)
        place = int.from_bytes(key[:8], "big") / 2**64
        held_out = SPLITS[1 + (place >= data.held_out)] if place < 2 * data.held_out else "train"
        splits[held_out].append(passage)
    facts = {
        "source": data.text or "the documentation inside Python",
        "sha256": digest.hexdigest(),
        "held_out": data.held_out,
        "vocab_size": vocab_size,
    }
    if folder.exists():
        found = Corpus(folder, json.loads((folder / "corpus.json").read_text()))
        changed = [name for name, value in facts.items() if found.facts.get(name) != value]
        if changed:
            raise UsageError(
                f"{folder} was made from another text or recipe ({', '.join(changed)} differ): "
                "choose another --out"
            )
        return found

    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    temporary.mkdir(parents=True)
    try:
        tokenizer = _train_tokenizer(splits["train"], vocab_size)
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer, eos_token=END_OF_TEXT
        ).save_pretrained(temporary / "tokenizer")
        dtype = "<u2" if vocab_size <= 2**16 else "<u4"
        tokens: dict[str, int] = {}
        with tqdm(
            total=sum(map(len, splits.values())), desc="tokens", unit="passage", disable=None
        ) as bar:
            for split in SPLITS:
                tokens[split] = _write_tokens(
                    tokenizer, splits[split], temporary / f"{split}.bin", dtype, bar
                )
        # A block is a sequence and the token that follows its last one.
        block = training.sequence_length
        for split, blocks in (("train", training.batch_size), ("valid", 1), ("test", 1)):
            if tokens[split] < blocks * block + 1:
                raise UsageError(
                    f"the text is too short: its {split} split has {tokens[split]} tokens, and the "
                    f"recipe needs {blocks * block + 1} ({blocks} x {block} and one). Give more "
                    "text, or lower batch_size or sequence_length"
                )
        facts |= {
            "dtype": dtype,
            "tokens": tokens,
            "passages": {split: len(passages) for split, passages in splits.items()},
        }
        (temporary / "corpus.json").write_text(json.dumps(facts, indent=2))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Corpus(folder, facts)


def python_documentation() -> Iterator[str]:
    """Passages of the language reference's topics and of the standard library's docstrings.

    They come with every CPython: about 2 MB of English prose, the same for the same version.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "this Python comes without pydoc_data: give a text of your own with --text"
        ) from None
    for _, topic in sorted(topics.items()):
        yield from passages(topic)
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 keeps some files in older dialects
            continue
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        yield from passages("\n\n".join(filter(None, map(ast.get_docstring, nodes))))


def text_files(path: Path) -> Iterator[str]:
    """Passages of a text file (UTF-8, also .gz, .bz2 or .xz), or of all text files in a folder."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _is_text(p))
        if not files:
            raise UsageError(f"--text {path}: no file in it ends in {', '.join(_TEXT_FILES)}")
    else:
        files = [path]
    empty = True
    for file in files:
        try:
            with fsspec.open(file, "rt", encoding="utf-8", compression="infer") as stream:
                text = stream.read()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"--text {file}: not UTF-8 text (byte {error.start}); convert it first"
            ) from None
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--text {file}: {reason}") from None
        for passage in passages(text):
            empty = False
            yield passage
    if empty:
        raise UsageError(f"--text {path}: there is no text in it")


def passages(text: str, length: int = 4000) -> Iterator[str]:
    """Cut a text at the first blank line after ``length`` characters, or after four times that."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), 4 * length):  # one piece, unless the line is very long
            piece = line[start : start + 4 * length]
            lines.append(piece)
            size += len(piece)
            if size >= 4 * length or (size >= length and not line.strip()):
                yield from filter(None, ["".join(lines).strip()])
                lines, size = [], 0
    yield from filter(None, ["".join(lines).strip()])


def _is_text(path: Path) -> bool:
    suffixes = path.suffixes[-2:]
    if suffixes and suffixes[-1] in (".gz", ".bz2", ".xz"):
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _TEXT_FILES


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_tokens(
    tokenizer: Tokenizer, texts: list[str], path: Path, dtype: str, bar: "tqdm[Any]"
) -> int:
    """Write the texts' token ids, an end-of-text token before each; return their number."""
    written = 0
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    with path.open("wb") as file:
        for start in range(0, len(texts), 64):
            part = texts[start : start + 64]
            for encoding in tokenizer.encode_batch(part):
                ids = np.array([end_of_text, *encoding.ids], dtype=dtype)
                file.write(ids.tobytes())
                written += len(ids)
            bar.update(len(part))
    return written
