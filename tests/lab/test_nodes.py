"""Two nodes with addresses of their own: network namespaces, and torchrun in each."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from laboratory import EXACT, close

ARM = ["--arm", "coupled_adam"]
MANY = ["--steps", 60, "--training.evaluate_every=10"]


class Nodes:
    """Two network namespaces, joined by a cable."""

    def __init__(self):
        self.processes = []
        self.holders = [self._hold(["unshare", "-rn"])]
        self.holders.append(self._hold([*self.enter(0), "unshare", "-n"]))
        second = str(self.holders[1].pid)
        for node, command in (
            (0, "ip link add name node0 type veth peer name node1"),
            (0, f"ip link set node1 netns {second}"),
            *((node, "ip link set lo up") for node in (0, 1)),
            *((node, f"ip addr add 10.77.0.{node + 1}/24 dev node{node}") for node in (0, 1)),
            *((node, f"ip link set node{node} up") for node in (0, 1)),
        ):
            subprocess.run([*self.enter(node), *command.split()], check=True, capture_output=True)

    @staticmethod
    def _hold(command):
        """A process that has a namespace, for as long as it lives."""
        program = [*command, sys.executable, "-c", "print(flush=True); input()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(program, **pipes, text=True)
        if process.stdout.readline() != "\n":
            raise OSError(process.communicate()[1])
        return process

    def enter(self, node):
        """What comes before a command to run it on a node."""
        first = ["nsenter", "-t", str(self.holders[0].pid), "--preserve-credentials", "-U", "-n"]
        return first if node == 0 else [*first, "nsenter", "-t", str(self.holders[1].pid), "-n"]

    def close(self):
        for process in self.processes:
            kill(process)
        for holder in self.holders:
            holder.kill()
            holder.communicate()


@pytest.fixture
def nodes():
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    with contextlib.ExitStack() as stack:
        try:
            made = Nodes()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs network namespaces: {error}")
        stack.callback(made.close)
        yield made


def start(lab, nodes, node, out, *more):
    """torchrun on a node, with one process there."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29500", "--rdzv-id", "1"]
    # A namespace has the name of the machine, by which torchrun would know where it is.
    torchrun += ["--rdzv-conf", f"is_host={1 - node}", "--local-addr", f"10.77.0.{node + 1}"]
    torchrun += ["--max-restarts", "3"]
    python, *command = lab.command(out, *ARM, *MANY, *EXACT, *more)
    told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"node{node}"}
    # Or a node that comes back is not told where the others' store is (torch 2.13).
    told |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (lab.folder / f"{out}-{node}.log").open("a") as log:
        process = subprocess.Popen(
            [*nodes.enter(node), python, *torchrun, *command],
            stderr=log,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **told},
            start_new_session=True,
        )
    nodes.processes.append(process)
    return process


def wait(lab, out, processes):
    codes = [process.wait(timeout=300) for process in processes]
    logs = [(lab.folder / f"{out}-{node}.log").read_text() for node in (0, 1)]
    assert codes == [0, 0], logs


def until_step(lab, out, step, processes):
    """Wait for a checkpoint."""
    deadline = time.monotonic() + 300
    while not (lab.folder / out / "checkpoints" / f"step-{step}").exists():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def kill(process):
    """The node is gone: its agent, and what it has started."""
    for child in subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow(minutes=1)
def test_a_node_is_killed_and_comes_back(lab, nodes):
    """The other's agent starts its process anew, and both go on from the last checkpoint."""
    options = ["cut", "--strategy", "fsdp2", "--resume"]
    processes = [start(lab, nodes, node, *options) for node in (0, 1)]
    until_step(lab, "cut", 20, processes)
    kill(processes[1])
    processes[1] = start(lab, nodes, 1, *options)
    wait(lab, "cut", processes)
    result = lab.result("cut")
    weights, log, _ = lab.reference(*ARM, *MANY, *EXACT)
    close(weights, result[0], 1e-10)
    assert len(log) == len(result[1])
