"""Real processes of Python that need not import anything: forks of one that has.

A test starts a command line, as with subprocess, where it is not about how Python starts. The child
has its own process group, environment, folder, standard streams, signals and exit code. What
libraries read from the environment on import, as OMP_NUM_THREADS, is that of the server.
"""

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

_TESTS = str(Path(__file__).parent)
PRELOADED = [
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "tensorboard.summary.writer.event_file_writer",
    "lightning.pytorch",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "coupled_adam.lab.comparison",
    "coupled_adam.lab.evaluation.evaluate",
    "coupled_adam.lab.reporting.report",
    "coupled_adam.cli",
]
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(PRELOADED)
# What a test that failed has left must not keep pytest from ending.
atexit.register(lambda: [process.kill() for process in multiprocessing.active_children()])


_numbers = itertools.count()


@functools.cache
def _output_folder():
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def start_server():
    """Start the server, if it does not run yet, with the environment of this moment.

    Lightning notes on import which optional packages there are, and every fork inherits that.
    """
    multiprocessing.forkserver.ensure_running()


class Process:
    """``python ARGUMENTS``: a file, ``-m`` and a module, or ``-c`` and a text, and what follows.

    Used as a ``subprocess.Popen`` whose output is text; its standard input is empty.

    Args:
        command: the command line; its first part is the interpreter, which is this one.
        env: the whole environment; by default this process's.
        cwd: the folder to start in; by default this process's.
        group: the process whose group it joins; by default it leads one of its own.
    """

    def __init__(self, command, env=None, cwd=None, group=None):
        assert command[0] == sys.executable
        self._outputs = [_output_folder() / f"{next(_numbers)}.txt" for _ in range(2)]
        for path in self._outputs:
            path.touch()
        self._process = _forks.Process(
            target=_run,
            args=(
                list(map(str, command[1:])),
                dict(os.environ if env is None else env),
                str(cwd or Path.cwd()),
                self._outputs,
                group.pid if group else 0,
            ),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        """Negative for the signal that ended it, None while it runs."""
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=600):
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutError(f"{self.communicate()} after {timeout} seconds")
        return self.returncode

    def communicate(self, timeout=600):
        """Its standard output and standard error, when it has ended."""
        self.wait(timeout)
        return tuple(path.read_text() for path in self._outputs)

    def until(self, text, timeout=200):
        """Wait until it has said something on its standard output."""
        deadline, has_ended = time.monotonic() + timeout, False
        while text not in self._outputs[0].read_text():
            assert not has_ended, self.communicate()
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
            has_ended = self.returncode is not None  # after which it is read once more

    def send_signal(self, number):
        """Nothing happens where it has ended, as in subprocess.Popen; the server reaps it first."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


def start_ranks(number, command, env=None, cwd=None, last=None):
    """A command on several ranks that form one process group, told what torchrun tells them.

    Torch's store for their rendezvous is in this process, as it is in torchrun. ``last`` has
    the arguments of :class:`Process` that are others for the last rank.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    processes = []
    for rank in range(number):
        told |= {"RANK": rank, "LOCAL_RANK": rank}
        environment = {**(os.environ if env is None else env), **told}
        environment = {name: str(value) for name, value in environment.items()}
        own = {"command": command, "env": environment, "cwd": cwd}
        own |= last if last and rank == number - 1 else {}
        processes.append(Process(**own, group=processes[0] if rank else None))
        processes[-1].store = store
    return processes


def run_on_ranks(number, program, names, *arguments):
    """Every rank of a program ends well, and has said ``<name: passed>`` of each case."""
    processes = start_ranks(number, [sys.executable, program, *arguments])
    for process in processes:
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        for name in names:
            assert stdout.count(f"<{name}: passed>") == 1


def run_cases(cases, *arguments):
    """What the program of a rank does: each of the cases by name, and say that it has passed."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for name, case in cases.items():
        case(*arguments)
        print(f"<{name}: passed>", flush=True)
    dist.destroy_process_group()


def _run(arguments, environment, folder, outputs, group):
    """In the child: what the interpreter does before it runs a program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # though pytest ran in the background
    for stream, path in zip((1, 2), outputs):
        target = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(target, stream)
        os.close(target)
    missing = set(PRELOADED) - set(sys.modules)
    assert not missing, f"the server could not import {missing}"
    while group and os.getpgid(group) != group:  # its leader has just been started
        time.sleep(0.001)
    os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(environment)
    # The server's packages did not see those of tests/frameworks, which this process may have.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(sys.prefix) / "frameworks"]
    sys.path += filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, folder)
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.path[:0] = [str(Path(arguments[0]).parent), _TESTS]
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
