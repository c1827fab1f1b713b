"""Pictures of several matrices: what is drawn is seen."""

import numpy as np
from matplotlib.figure import Figure

from coupled_adam.embeddings import pictures


def test_a_matrix_with_larger_norms_is_not_clipped():
    small, large = np.linspace(1, 2, 50), np.linspace(1, 5, 50)
    for sizes in ((small, large), (large, small)):
        norms, histogram = Figure().subplots(1, 2)
        for size, color in zip(sizes, ("tab:red", "tab:blue")):
            pictures.plot_norms(norms, size, np.arange(1, 51), color)
            pictures.plot_norm_histogram(histogram, size, color)
        for low, high in (norms.get_ylim(), histogram.get_xlim()):
            assert low == 0
            assert 5 <= high < 6
