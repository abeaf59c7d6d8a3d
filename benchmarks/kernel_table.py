# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for GPUs that need not be there, and tables what their machine code says.

Every kernel that a forward, a backward or a decoding step launches, in its default configuration, for compute
capabilities 8.0, 9.0 and 10.0 at the default sizes: head dimension 64, chunks of 64, two layers of hidden width 256
and 128, and one layer; bfloat16.

    python benchmarks/kernel_table.py                            # all of them; writes benchmarks/results/kernels.*
    python benchmarks/kernel_table.py --kernels writer --targets 90 --memories h256 --config 32 8 1 --dtype float32
                                                                 # some of them, or other sizes: only prints

TRITON_INTERPRET must not be set. The exit code is 1 if a kernel exceeds a card's limits or spills in a loop.

A launch is recorded instead of run: the package's own launch functions are called with tensors on the CPU, and what
they hand to Triton is compiled.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


# Triton 3.9 warns, and later versions differ, unless multiply-add fusion is asked for.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch  # noqa: E402
import triton  # noqa: E402
from op_package import op_module, random_inputs, replaced, scan_options  # noqa: E402
from sass import analyse  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402


RESULTS = Path(__file__).parent / "results"
TARGETS = (80, 90, 100)
MEMORIES: dict[str, dict[str, int]] = {
    "h256": {"depth": 2, "expansion": 4},
    "h128": {"depth": 2, "expansion": 2},
    "depth1": {"depth": 1},
}
DEFAULT_SIZES = {"groups": 2, "chunk_size": 64, "head_dim": 64, "dtype": torch.bfloat16}
# Shared memory of one block in KiB, registers of a thread and columns of tensor memory that a card has.
SHARED_LIMIT = {80: 163, 90: 227, 100: 227}
REGISTER_LIMIT = 255
TENSOR_MEMORY_LIMIT = 512
# float32 without tensor cores, by design: see triton_coefficients.
WITHOUT_TENSOR_CORES = ("coefficients", "coefficients_backward")

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    """A kernel's launch: the function, the values of its parameters by name, Triton's options, its `LaunchConfig`."""

    function: JITFunction
    values: dict[str, Any]
    options: dict[str, int]
    config: Any


def kernel_name(function: JITFunction) -> str:
    return re.fullmatch(r"_(.*)_kernel", function.__name__)[1]


class Row(NamedTuple):
    """One line of the table; see `sass.Figures`."""

    kernel: str
    memory: str
    target: int
    tile: int
    num_warps: int
    num_stages: int
    tokens: int
    registers: int
    shared_kib: float
    tensor_memory: int
    stack: int
    spill_stores_in_loops: int
    spill_loads_in_loops: int
    spill_stores_outside: int
    spill_loads_outside: int
    tensor_instructions: int
    instructions: int


@contextlib.contextmanager
def recorded_launches(target: int, config: list[int] | None) -> Iterator[list[Launch]]:
    """While this context is open, a kernel's launch is appended to the list it gives, and nothing runs."""
    launches: list[Launch] = []
    configs: dict[str, Any] = {}
    module = op_module("triton_configs")
    default_for, given = module.config_for, None if config is None else module.LaunchConfig(*config)

    def config_for(kernel: str, *sizes):
        configs[kernel] = given or default_for(kernel, *sizes)
        return configs[kernel]

    def record(function, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages")}
        values = dict(function.signature.bind(*args, **kwargs).arguments)
        launches.append(Launch(function, values, options, configs[kernel_name(function)]))

    functions = {"capability_of": lambda tensor: divmod(target, 10), "config_for": config_for}
    with mock.patch.object(JITFunction, "run", record), replaced(**functions):
        yield launches


def launches_of(target: int, config: list[int] | None = None, rule: str = "titans", **sizes) -> dict[str, Launch]:
    """One launch of each kernel, by name: of a forward and backward over two chunks, and of a decoding step.

    Args:
        config: a `LaunchConfig`'s fields; None: each kernel's default.
        rule: the memory's. sizes: as for `random_inputs`.
    """
    triton_scan, decode = op_module("memory_ops_triton").triton_scan, op_module("triton_decode").decode
    sizes = {**DEFAULT_SIZES, **sizes}
    inputs, opened = random_inputs(num_chunks=2, **sizes), random_inputs(num_chunks=1, **sizes)
    step = random_inputs(num_chunks=1, num_queries=1, **sizes)
    if op_module("scan_inputs").RULES[rule].linear:
        inputs, opened, step = (t._replace(norm_weight=None, norm_bias=None) for t in (inputs, opened, step))
    with recorded_launches(target, config) as launches:
        triton_scan(opened, scan_options(inputs, write=False, rule=rule))
        for tensor in (inputs.q, inputs.k, inputs.v, *inputs.weights):
            tensor.requires_grad_()
        triton_scan(inputs, scan_options(inputs, rule=rule)).output.sum().backward()
        decode(step, scan_options(step, write=False, rule=rule), torch.zeros(2, dtype=torch.int32))
    return {kernel_name(launch.function): launch for launch in launches}


def compiled(launch: Launch, target: int):
    """The launch's kernel for a compute capability, specialised as Triton does when it launches."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.function.params):
        value = launch.values[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if specialised and aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)


def _type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def table_row(launch: Launch, memory: str, target: int) -> Row:
    kernel = compiled(launch, target)
    figures = analyse(kernel.asm["cubin"])
    return Row(
        kernel_name(launch.function),
        memory,
        target,
        *launch.config,
        figures.registers,
        round(kernel.metadata.shared / 1024, 1),
        kernel.metadata.tmem_size or 0,
        *figures[1:],
    )


def complaints(row: Row) -> list[str]:
    """What is wrong with a kernel's machine code: limits of the card, and what a default must not do."""
    found = []
    if row.shared_kib > SHARED_LIMIT[row.target]:
        found.append(f"needs {row.shared_kib} KiB of shared memory, the card has {SHARED_LIMIT[row.target]}")
    if row.registers > REGISTER_LIMIT:
        found.append(f"needs {row.registers} registers, a thread has {REGISTER_LIMIT}")
    if row.tensor_memory > TENSOR_MEMORY_LIMIT:
        found.append(f"needs {row.tensor_memory} columns of tensor memory, the card has {TENSOR_MEMORY_LIMIT}")
    if not row.tensor_instructions and row.kernel not in WITHOUT_TENSOR_CORES:
        found.append("has no tensor-core instructions")
    spills = (row.spill_stores_in_loops, row.spill_loads_in_loops)
    if any(spills):
        found.append(f"spills inside loops: {spills[0]} stores and {spills[1]} loads")
    return [f"{row.kernel}, {row.memory}, sm_{row.target}: {what}" for what in found]


def make_rows(
    kernels: list[str] | None = None,
    memories: Iterable[str] = tuple(MEMORIES),
    targets: Iterable[int] = TARGETS,
    progress=lambda todo: todo,
    **choices,
) -> list[Row]:
    """The table's rows.

    Args:
        kernels: their names; None: all of them.
        progress: wraps the list of what is to be compiled.
        choices: as for `launches_of`.
    """
    todo = []
    for memory, target in itertools.product(memories, targets):
        launches = launches_of(target, **MEMORIES[memory], **choices)
        unknown = set(kernels or ()) - set(launches)
        if unknown:
            raise ValueError(f"kernels are {sorted(unknown)}, expected some of {sorted(launches)}")
        todo += [(launches[name], memory, target) for name in (kernels or launches)]
    return [table_row(*item) for item in progress(todo)]


def markdown(rows: list[Row], command: str) -> str:
    """The table that is kept."""
    columns = (
        *("kernel", "memory", "target", "tile", "warps", "stages", "tokens"),
        *("registers", "shared KiB", "TMEM", "stack B", "spills in loops", "spills outside", "tensor", "instructions"),
    )
    lines = [
        "# What the Triton kernels compile to",
        "",
        f"Made by `{command}` with Triton {triton.__version__}, without a GPU: every kernel in its default",
        "configuration at head dimension 64, chunks of 64 tokens, bfloat16 inputs. h256 and h128: two layers of that",
        "hidden width; depth1: one layer. tile to tokens: see `triton_configs`. TMEM: columns of tensor memory.",
        "Spills: stores/loads in the machine code, inside loops and outside. tensor: tensor-core instructions in the",
        "code, which loops execute many times; the coefficients are recurrences and have none.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for r in rows:
        spills = (
            f"{r.spill_stores_in_loops}/{r.spill_loads_in_loops}",
            f"{r.spill_stores_outside}/{r.spill_loads_outside}",
        )
        cells = (*r[:2], f"sm_{r.target}", *r[3:11], *spills, *r[15:])
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = parse_arguments()
    from tqdm import tqdm

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    rows = make_rows(**chosen, progress=lambda todo: tqdm(todo, unit="kernel"))
    text = markdown(rows, "python benchmarks/kernel_table.py")
    print(text)
    if not chosen:
        result = {"triton": triton.__version__, "rows": [row._asdict() for row in rows]}
        RESULTS.joinpath("kernels.json").write_text(json.dumps(result, indent=1) + "\n")
        RESULTS.joinpath("kernels.md").write_text(text)
    found = [complaint for row in rows for complaint in complaints(row)]
    print(*found, sep="\n")
    return 1 if found else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", help="names; without: all of them")
    parser.add_argument("--memories", nargs="+", choices=list(MEMORIES))
    parser.add_argument("--targets", nargs="+", type=int, choices=TARGETS)
    parser.add_argument("--config", nargs="+", type=int, metavar="N", help="tile, warps, stages, tokens; for all")
    parser.add_argument("--rule", help="how the memory learns; without: titans")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), help="of q, k and v")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--chunk-size", type=int)
    arguments = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
