"""The command on a small recipe and text, as real processes that are stopped and killed."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file

from coupled_adam import cli

FAULTY = Path(__file__).with_name("faulty.py")

SHORT = ["--steps", 40, "training.evaluate_every=10"]
LONG = ["--steps", 200, "training.evaluate_every=10"]  # so long that it is stopped where we want

# In float64, and at a learning rate at which training does not amplify differences, other orders of
# summation leave about 1e-13. A wrong mean over the vocabulary, batch or loss would show at once.
EXACT = ["training.precision=64-true", "training.lr=1e-3"]


def take_interrupts():
    """In a process: Ctrl-C works also where these tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Laboratory:
    """The command on a small recipe and text, as processes."""

    references: ClassVar = {}

    def __init__(self, folder, recipe, text):
        self.folder = folder
        self.common = ["--recipe", str(recipe), "--device", "cpu"]
        self.common += [] if text is None else ["--text", str(text)]
        self.common += ["--cache", str(folder / "cache")]

    def command(self, out, *more, processes=1, fault=None):
        """The training of a run; with a fault that tests/faulty.py builds in."""
        python = [sys.executable]
        if processes > 1:
            python += ["-m", "torch.distributed.run", "--standalone"]
            python += ["--nproc-per-node", str(processes)]
        program = ["-m", "coupled_adam.cli"] if fault is None else [FAULTY, *fault.split()]
        train = [*program, "train", "--out", self.folder / out, *self.common]
        return [*python, *map(str, train), *map(str, more)]

    def start(self, out, *more, preexec_fn=take_interrupts, **options):
        return subprocess.Popen(
            self.command(out, *more, **options),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=preexec_fn,
        )

    def run(self, out, *more, code=0, **options):
        """To its end; in this process, which saves the imports, if nothing is said against it."""
        if options:
            process = self.start(out, *more, **options)
            _, stderr = process.communicate(timeout=300)
            returned = process.returncode
        else:
            arguments = self.command(out, *more)[3:]
            said, threads = io.StringIO(), torch.get_num_threads()
            torch.set_num_threads(1)  # as the processes have
            try:
                with warnings.catch_warnings(), contextlib.redirect_stderr(said):
                    warnings.simplefilter("default")
                    returned = cli.main(arguments)
            finally:
                torch.set_num_threads(threads)
            stderr = said.getvalue()
        assert returned == code, stderr
        return stderr

    def command_line(self, *arguments, fault, code=0):
        """Any command, with a fault that tests/faulty.py builds in."""
        command = [sys.executable, str(FAULTY), *fault.split(), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == code, result.stderr

    def stop(self, out, *more, step, number, code, **options):
        """Send a signal to all its processes once this run has logged that step."""
        metrics = self.folder / out / "metrics.jsonl"
        before = metrics.stat().st_ino if metrics.exists() else None
        process = self.start(out, *more, **options)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.stat().st_ino != before:  # a resumed run writes it anew
                last = metrics.read_text().rpartition('{"step": ')[2].partition(",")[0]
                if last and int(last) >= step:
                    os.killpg(process.pid, number)
                    _, stderr = process.communicate(timeout=100)
                    assert code is None or process.returncode == code, stderr
                    return stderr
            time.sleep(0.01)
        process.kill()
        raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")

    def srun(self, *arguments, **options):
        """Two processes as SLURM starts them, with what it tells them."""
        told = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
        told |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0"}
        told |= {"SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
        told |= {"OMP_NUM_THREADS": "1"}
        return [
            subprocess.Popen(
                self.command(*arguments, **options),
                env={**os.environ, **told, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
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
        (weights, *rest), (expected, *others) = self.result(out), self.reference(*arguments)
        assert rest == others
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
        return sorted(path.stem for path in (self.folder / out / "checkpoints").glob("*.json"))


def close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == torch.float64
        assert (tensor - other[name]).abs().max() <= tolerance, name
