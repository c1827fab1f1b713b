"""The C kernel's loops over columns use vectors: read in the disassembly of the library.

A compiler gives no warning when it splits a vector into single numbers, and the results stay the
same; only the speed is lost.
"""

import platform
import re
import shutil
import subprocess

import pytest

from coupled_adam.optim.kernels import native

MACHINES = {"x86_64": "x86", "AMD64": "x86", "aarch64": "arm", "arm64": "arm"}
MACHINE = MACHINES.get(platform.machine())

# Arithmetic on single floating-point numbers, and numbers put into vectors or taken out one by one.
SCALAR = {
    "x86": r"v?(add|sub|mul|div|sqrt|u?comi|cvt\w+2)s[sd]\b"
    r"|v?p?(insr|extr|insert|extract)(b|w|d|q|ps)\b",
    "arm": r"f(add|sub|mul|div|sqrt|madd|msub|cmp)\s+[sd]\d|(u|s)mov\s|ins\s|dup\s+[bhsd]\d",
}
PACKED = {
    "baseline": {"x86": r"(add|sub|mul)p[sd]\s.*xmm", "arm": r"f(add|sub|mul)\s+v\d+\.[24][sd]"},
    "avx2": {"x86": r"v(add|sub|mul)p[sd]\s.*ymm"},
    "avx512": {"x86": r"v(add|sub|mul)p[sd]\s.*zmm"},
}


def functions(path):
    """The instructions of each function, as (address, text), by the function's name."""
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for block in text.split("\n\n"):
        heading = re.match(r"[0-9a-f]+ <(\w+)>:\n", block.lstrip())
        if heading:
            lines = re.findall(r"^ *([0-9a-f]+):\s+(.*)$", block, re.M)
            yield heading[1], [(int(address, 16), line) for address, line in lines]


def loops(instructions):
    """The instructions of each loop: what lies between a jump backwards and its target."""
    start = instructions[0][0]
    for address, line in instructions:
        jump = re.match(r"(?:j\w+|b\.?\w*|cbn?z|tbn?z)\s+(?:.*,\s*)?(?:0x)?([0-9a-f]+)\b", line)
        if jump and start <= int(jump[1], 16) < address:
            yield [text for at, text in instructions if int(jump[1], 16) <= at <= address]


def scalar(loop):
    """The instructions of a loop that work on single numbers."""
    return [line for line in loop if re.match(SCALAR[MACHINE], line)]


needs_objdump = pytest.mark.skipif(
    native.library() is None or not shutil.which("objdump") or MACHINE is None,
    reason="needs the C kernel, objdump, and a processor whose instructions are listed here",
)


@needs_objdump
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
def test_vectors(instructions, dtype):
    if MACHINE == "arm" and instructions != "baseline":
        pytest.skip("this processor has one width of vectors")
    checked = set()
    for name, code in functions(native.PATH):
        if not name.endswith(f"_columns_{dtype}_{instructions}"):
            continue
        found = list(loops(code))
        for loop in found:
            assert not scalar(loop), name
        packed = PACKED[instructions][MACHINE]
        assert any(re.match(packed, line) for loop in found for line in loop), name
        checked.add(name.partition("_columns")[0])
    assert checked >= {"square", "square_sum", "square_moment", "square_moment_sum"}
    assert checked >= {"moment", "sum", "update"}
    assert ("update_stochastically" in checked) == (dtype == "bfloat16")


@needs_objdump
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_loop_without_vectors_is_seen(tmp_path):
    source, library = tmp_path / "scale.c", tmp_path / "scale.so"
    source.write_text("void scale(float *x, long n) { for (long i = 0; i < n; i++) x[i] *= 3; }")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    (code,) = (code for name, code in functions(library) if name == "scale")
    assert any(scalar(loop) for loop in loops(code))
