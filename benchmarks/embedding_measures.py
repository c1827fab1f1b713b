"""Time and memory to measure a matrix: ``analyze`` against a loop over the eigenvectors.

    python benchmarks/embedding_measures.py benchmarks/results/embedding_measures.json

Each of the two runs three times, in turn and in a separate process, which also measures the memory
that it needs in addition to the matrix. The loop computes the isotropy in the usual way: an
eigendecomposition, then for each eigenvector a product with the whole matrix and its exponentials.
The script takes a quarter of an hour on two cores.
"""

import json
import subprocess
import sys
from pathlib import Path

from coupled_adam.files import write_atomically
from coupled_adam.lab.training.environment import environment

SETUP = """
import resource, time, json
import numpy as np, torch
from coupled_adam.embeddings import analyze, isotropy

def loop(matrix):
    matrix = matrix.float().numpy()
    _, vectors = np.linalg.eigh(matrix.T @ matrix)
    z = [np.exp(matrix @ vectors[:, i]).sum() for i in range(vectors.shape[1])]
    return min(z) / max(z)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

rows, columns, dtype, method = json.loads(input())
torch.manual_seed(0)
matrix = torch.empty(rows, columns, dtype=getattr(torch, dtype))
for block in matrix.split(8192):
    block.copy_(torch.randn(block.shape) * 0.02 + 0.005)
small = torch.randn(9, 3)
measure = {"analyze": analyze, "isotropy": isotropy, "loop": loop}[method]
measure(small)  # load what is loaded once
before, start = peak(), time.perf_counter()
result = measure(matrix)
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds,
    "extra_gb": (peak() - before) / 1e9,
    "isotropy": float(getattr(result, "isotropy", result)),
}))
"""

CASES = [
    (50304, 768, "float32", ("analyze", "isotropy", "loop"), 3),
    (128256, 2048, "bfloat16", ("analyze", "isotropy", "loop"), 1),
    (256000, 4096, "bfloat16", ("analyze", "isotropy"), 1),
]


def main(target: Path) -> None:
    results = []
    for rows, columns, dtype, methods, times in CASES:
        for _ in range(times):
            for method in methods:
                arguments = json.dumps([rows, columns, dtype, method])
                command = [sys.executable, "-c", SETUP]
                done = subprocess.run(
                    command, input=arguments, capture_output=True, text=True, check=True
                )
                case = {"rows": rows, "columns": columns, "dtype": dtype, "method": method}
                results.append({**case, **json.loads(done.stdout)})
                print(results[-1])
    content = {"environment": environment(), "results": results}
    write_atomically(target, json.dumps(content, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
