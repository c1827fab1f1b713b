"""Each example as a user runs it; what continues must be what would have been."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coupled_adam import cli
from coupled_adam.cli.parser import parsed
from processes import Process, start_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"


def output(example, *arguments, ranks=1):
    """What it says on standard output, of several ranks the first."""
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    alone = ranks == 1 and example != "shared_host_table.py"
    processes = [Process(command, env)] if alone else start_ranks(ranks, command, env)
    outputs = [process.communicate() for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return outputs[0][0]


def run(*arguments, **options):
    """Its last line: the step, the loss where it prints one, the relative mean norm."""
    lines = output(*arguments, **options).splitlines()
    line = [line for line in lines if "relative mean norm" in line][-1]
    step, loss, ratio = re.fullmatch(
        r"step (\d+): (?:loss ([\d.]+), )?relative mean norm ([\d.]+)", line
    ).groups()
    return int(step), loss and float(loss), float(ratio)


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal(folder, other):
    """Two folders hold models with the same bits."""
    torch.testing.assert_close(weights(folder), weights(other), rtol=0, atol=0)


def assert_continues(folder, example, steps, stop_after):
    """Stopped and called again, it ends where it ends if it is not stopped, in `whole`."""
    arguments = (example, "--steps", steps, "--out")
    assert run(*arguments, folder / "whole")[0] == steps
    assert run(*arguments, folder / "cut", "--stop-after", stop_after)[0] == stop_after
    assert run(*arguments, folder / "cut")[0] == steps
    assert_equal(folder / "whole" / "model", folder / "cut" / "model")


def test_pytorch_loop(tmp_path):
    """Against AdamW; and stopped half-way."""
    _, coupled_loss, coupled = run(
        "pytorch_loop.py", "--steps", 80, "--checkpoint", tmp_path / "whole.pt"
    )
    _, adamw_loss, adamw = run(
        *("pytorch_loop.py", "--steps", 80, "--optimizer", "adamw"),
        *("--checkpoint", tmp_path / "adamw.pt"),
    )
    # LEAN's updates do not sum to zero in so few steps, and there is no warmup
    assert 0.1 < coupled < 0.5 < adamw
    assert coupled_loss < adamw_loss + 0.3 < 3.5
    cut = ("pytorch_loop.py", "--steps", 80, "--checkpoint", tmp_path / "cut.pt")
    assert run(*cut, "--stop-after", 35)[0] == 35
    assert run(*cut)[0] == 80
    saved = [torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("whole", "cut")]
    torch.testing.assert_close(saved[0]["model"], saved[1]["model"], rtol=0, atol=0)
    states = [checkpoint["optimizer"]["state"] for checkpoint in saved]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    shapes = [tuple(state["exp_avg_sq"].shape) for state in saved[0]["optimizer"]["state"].values()]
    assert shapes[-1] == (64,)  # the coupled group comes last


def test_hashed_ngrams():
    """The table learns, and its state is what the page says."""
    losses = []
    for rows in (100_000, 0):
        said = output("hashed_ngrams.py", "--steps", 100, "--rows", rows)
        losses.append(float(re.findall(r"step 100: loss ([\d.]+)", said)[0]))
        assert ("with 8.0 bytes of state a row of the table" in said) == (rows > 0)
    assert losses[0] < losses[1] - 0.3


KILLED = """
import os, runpy, signal, sys, torch
from coupled_adam import CoupledAdamW

step, taken = CoupledAdamW.step, []


def step_until_killed(optimizer):
    taken.append(0)
    (table,) = optimizer.param_groups[-1]["params"]
    if len(taken) == 5 and table.grad is not None:
        half = table.grad._nnz() // 2
        rows, values = table.grad._indices()[:, :half], table.grad._values()[:half]
        table.grad = torch.sparse_coo_tensor(rows, values, table.shape, check_invariants=False)
        step(optimizer)
        os.kill(os.getpid(), signal.SIGKILL)
    step(optimizer)


CoupledAdamW.step = step_until_killed
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_host_table(ranks, tmp_path):
    """Processes with a table are as one; killed in a step, they go on as if they had not been."""
    script = ("shared_host_table.py", "--steps", 6, "--save-steps", 2, "--rows", 20_000)
    for name, number in (("one", 1), ("whole", ranks)):
        run(*script, "--checkpoint", tmp_path / name, ranks=number)
    arguments = [str(EXAMPLES / script[0]), *script[1:], "--checkpoint", tmp_path / "cut"]
    killed = start_ranks(ranks, [sys.executable, "-c", KILLED, *arguments])
    for process in killed:
        process.communicate()
    assert killed[0].returncode == -signal.SIGKILL
    assert all(process.returncode for process in killed)
    resumed = start_ranks(ranks, [sys.executable, *arguments])
    assert all("continuing after step 4 of 6" in x.communicate()[0] for x in resumed)
    one, whole, cut = (
        torch.load(tmp_path / name, weights_only=True) for name in ("one", "whole", "cut")
    )
    for saved in (one, whole, cut):
        saved["optimizer"] = saved["optimizer"]["state"]
    torch.testing.assert_close(cut, whole, rtol=0, atol=0)
    torch.testing.assert_close(whole["table"], one["table"], rtol=0, atol=1e-4)
    assert (one["table"] != 0).any()


def test_shared_host_table_on_two_nodes():
    """Which cannot map one table."""
    env = {**os.environ, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    process = Process([sys.executable, str(EXAMPLES / "shared_host_table.py")], env)
    assert "use one node" in process.communicate()[1]
    assert process.returncode == 2


def test_huggingface_trainer(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ("huggingface_trainer.py", "--steps", 40, "--save-steps", 20)
    assert run(*arguments, "--out", whole)[0] == 40
    shutil.copytree(whole / "checkpoint-20", cut / "checkpoint-20")
    assert run(*arguments, "--out", cut, "--resume")[0] == 40
    assert_equal(whole, cut)
    state = torch.load(cut / "checkpoint-40" / "optimizer.pt", weights_only=True)
    (table,) = state["param_groups"][-1]["params"]
    assert state["param_groups"][-1]["coupled"]
    assert state["state"][table]["exp_avg_sq"].shape == (64,)


@pytest.mark.slow
def test_accelerate_loop(tmp_path):
    """Two processes over gloo are one with the same batches, up to the order of sums."""
    assert_continues(tmp_path, "accelerate_loop.py", steps=30, stop_after=12)
    run("accelerate_loop.py", "--steps", 30, "--out", tmp_path / "two", ranks=2)
    one_process, two_processes = (weights(tmp_path / name / "model") for name in ("whole", "two"))
    torch.testing.assert_close(two_processes, one_process, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_lightning_module(tmp_path):
    assert_continues(tmp_path, "lightning_module.py", steps=40, stop_after=20)


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("arguments", [["--dtype", "bfloat16"], ["--loop"]])
def test_finetune_per_layer_tables(arguments, tmp_path):
    """The small Gemma learns, and the memory of its tables is what LEAN's page says."""
    said = output("finetune_per_layer_tables.py", "--steps", 30, "--out", tmp_path, *arguments)
    assert float(re.findall(r"step 30: loss ([\d.]+)", said)[-1]) < 6.5 < math.log(2**14) - 3
    sizes = re.findall(r": ([\d.]+) MB of state, ([\d.]+) MB of gradients", said)
    (adamw, dense), (lean, sparse) = (map(float, pair) for pair in sizes)
    rows, elements = 2**14, 2**14 * (64 + 256)
    size = 2 if "bfloat16" in arguments else 4
    assert (adamw, dense) == pytest.approx((2 * size * elements / 1e6, size * elements / 1e6), 1e-2)
    # Of the embeddings, which are the head, one number a row and 2 H; of the other table two.
    assert lean == pytest.approx((4 * (rows + 128) + 8 * rows + 4 * 256) / 1e6, abs=0.01)
    assert sparse < dense / 3


@pytest.mark.slow
def test_muon():
    _, coupled_loss, coupled = run("muon.py", "--steps", 50)
    _, adamw_loss, adamw = run("muon.py", "--steps", 50, "--embeddings", "adamw")
    assert coupled < 0.6 < adamw
    assert coupled_loss < adamw_loss + 0.3 < 3.5


def test_notebook_is_committed_with_its_outputs():
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"display_data", "execute_result"}
    assert sum("image/png" in output["data"] for output in outputs) == 3
    assert (EXAMPLES / "tour.ipynb").stat().st_size < 500_000


@pytest.mark.slow(minutes=1)
def test_notebook(tmp_path):
    """In a kernel of Jupyter, with fewer steps; it draws as many pictures as the committed one."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    shown, run = (nbformat.read(EXAMPLES / "tour.ipynb", as_version=4) for _ in range(2))
    training = next(cell for cell in run.cells if cell.source.startswith("recipe = "))
    loading, few_steps = 'load_recipe("demo")', '{"training.steps": 20, "training.warmup": 5}'
    assert loading in training.source
    training.source = "from coupled_adam.lab.recipe import override\n" + training.source.replace(
        loading, f"override({loading}, {few_steps})"
    )
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(run, timeout=1800, resources=resources).execute()
    for before, after in zip(shown.cells, run.cells):
        kinds = [
            [output.output_type for output in cell.get("outputs", []) if "data" in output]
            for cell in (before, after)
        ]
        assert kinds[0] == kinds[1]


SBATCH = {"nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "signal": "TERM@300"}


@pytest.mark.parametrize(("code", "resumed"), [(0, False), (75, True)])
def test_slurm(code, resumed, tmp_path):
    """A process for each GPU, continued where there is something; queued again after code 75."""
    script = (EXAMPLES / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, flags=re.M))
    assert options.items() >= SBATCH.items()
    assert "#SBATCH --requeue" in script

    # SLURM's commands, which write down what they are asked, and end as the laboratory would
    for name in ("srun", "scontrol"):
        call = tmp_path / f"{name}.txt"
        (tmp_path / name).write_text(f'#!/bin/bash\necho "$@" > {call}\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "runs"
    out.mkdir()
    if resumed:
        (out / "comparison.yaml").touch()
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    batch = subprocess.run(["bash", EXAMPLES / "slurm.sh", "124M-5B", out], env=env)
    assert batch.returncode == code

    program, command, *arguments = (tmp_path / "srun.txt").read_text().split()
    assert (program, command) == ("coupled-adam", "compare")
    given = parsed(cli.load_command(command), arguments)
    assert (given.recipe, given.out, given.resume) == ("124M-5B", out, resumed)
    requeued = tmp_path / "scontrol.txt"
    assert (requeued.read_text() if requeued.exists() else None) == (
        "requeue 17\n" if code == 75 else None
    )
