"""The commands that are shown for files of word vectors, tried with gensim itself."""

import re

import numpy as np
import pytest
import torch

from coupled_adam.embeddings import load_embeddings

gensim = pytest.importorskip("gensim")

WORDS = ("the", "of", "and", "to")


# gensim leaves the file open where it has to find the width out.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", [{"binary": True}, {"binary": False}, {"write_header": False}])
@pytest.mark.parametrize("width", [3, 100, 768])
def test_the_command_that_is_shown_reads_the_vectors(options, width, tmp_path):
    matrix = np.random.default_rng(0).normal(size=(4, width)).astype(np.float32)
    vectors = gensim.models.KeyedVectors(width)
    vectors.add_vectors(WORDS, matrix)
    path, new = tmp_path / "vectors.txt", tmp_path / "new.npy"
    vectors.save_word2vec_format(path, **options)
    with pytest.raises(ValueError, match="which the package gensim reads") as error:
        load_embeddings(path)
    (command,) = re.findall(r"(numpy\.save\(.*\))$", str(error.value))
    exec(command.replace("NEW.npy", str(new)), {"numpy": np, "gensim": gensim})
    (entry,) = load_embeddings(new)
    assert torch.allclose(entry.matrix, torch.from_numpy(matrix), atol=1e-6)
