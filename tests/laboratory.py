"""The command on a small recipe and text, also as processes that are stopped and killed."""

import contextlib
import io
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file

from coupled_adam import cli
from processes import Process, start_ranks

FAULTY = Path(__file__).with_name("faulty.py")

SHORT = ["--steps", 40, "--training.evaluate_every=10"]
LONG = ["--steps", 140, "--training.evaluate_every=10"]  # so long that it is stopped where we want

# In float64, and at a learning rate at which training does not amplify differences, other orders of
# summation leave about 1e-13. A wrong mean over the vocabulary, batch or loss would show at once.
EXACT = ["--training.precision=64-true", "--training.lr=1e-3"]


class Laboratory:
    """The command on a small recipe and text, in this process or in others."""

    references: ClassVar = {}

    def __init__(self, folder, recipe, text):
        self.folder = folder
        self.common = ["--recipe", str(recipe), "--device", "cpu"]
        self.common += [] if text is None else ["--text", str(text)]

    def command(self, out, *more, fault=None):
        """The training of a run; with a fault that tests/faulty.py builds in."""
        program = ["-m", "coupled_adam"] if fault is None else [FAULTY, *fault.split()]
        train = [*program, "train", "--out", self.folder / out, *self.common, *more]
        return [sys.executable, *map(str, train)]

    def start(self, out, *more, processes=1, **options):
        """The training in processes of their own, which form one group; returns them all."""
        command = self.command(out, *more, **options)
        return [Process(command)] if processes == 1 else start_ranks(processes, command)

    def begun(self, out, *more):
        """A training in a process of its own, once it has logged something."""
        (process,) = self.start(out, *more)
        deadline = time.monotonic() + 200
        while not (self.folder / out / "metrics.jsonl").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    def run(self, out, *more, code=0, **options):
        """To its end; in this process, if nothing is said against it. Returns what was said."""
        if options:
            started = self.start(out, *more, **options)
            stderr = "".join(process.communicate()[1] for process in started)
            returned = next((p.returncode for p in started if p.returncode), 0)
        else:
            arguments = self.command(out, *more)[3:]
            captured = io.StringIO()
            with warnings.catch_warnings(), contextlib.redirect_stderr(captured):
                warnings.simplefilter("default")
                returned = cli.main(arguments)
            stderr = captured.getvalue()
        assert returned == code, stderr
        return stderr

    def stop(self, out, *more, step, number, code, **options):
        """Send a signal to all its processes once this run has logged that step."""
        metrics = self.folder / out / "metrics.jsonl"
        before = metrics.stat().st_ino if metrics.exists() else None
        processes = self.start(out, *more, **options)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and all(p.poll() is None for p in processes):
            if metrics.exists() and metrics.stat().st_ino != before:  # a resumed run writes it anew
                last = metrics.read_text().rpartition('{"step": ')[2].partition(",")[0]
                if last and int(last) >= step:
                    with contextlib.suppress(ProcessLookupError):  # the codes say that it ended
                        os.killpg(processes[0].pid, number)
                    stderr = "".join(process.communicate()[1] for process in processes)
                    assert all(process.returncode == code for process in processes), stderr
                    return stderr
            time.sleep(0.01)
        for process in processes:
            process.kill()
        stderrs = [process.communicate()[1] for process in processes]
        raise AssertionError(f"step {step} was not reached: {stderrs}")

    def srun(self, *arguments, **options):
        """Two processes as SLURM starts them, with what it tells them."""
        told = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
        told |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0"}
        told |= {"SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
        return [
            Process(
                self.command(*arguments, **options),
                {**os.environ, **told, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            )
            for rank in range(2)
        ]

    def result(self, out):
        """Weights, log and evaluation of a finished run."""
        evaluation = json.loads((self.folder / out / "evaluation.json").read_text())
        return self.weights(out), self.metrics(out), evaluation

    def reference(self, *arguments):
        """The result of a run that nothing happens to; it is trained once for all tests."""
        if arguments not in self.references:
            self.run("reference", *arguments)
            self.references[arguments] = self.result("reference")
        return self.references[arguments]

    def assert_equal(self, out, *arguments):
        """A run has the result of one that nothing happened to, bit for bit."""
        weights, *log_and_evaluation = self.result(out)
        expected, *expected_log_and_evaluation = self.reference(*arguments)
        assert log_and_evaluation == expected_log_and_evaluation
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())

    def weights(self, out):
        return load_file(self.folder / out / "model" / "model.safetensors")

    def metrics(self, out):
        """All but the time."""
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics]

    def checkpoints(self, out):
        return sorted(path.name for path in (self.folder / out / "checkpoints").glob("step-*"))


def snapshot(folder):
    """The content of each file in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def close(weights, expected, tolerance):
    """Two models in float64 differ in no weight by more than this."""
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64
        assert (tensor - expected[name]).abs().max() <= tolerance, name
