# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel's machine code says: registers, stack, spills inside and outside loops, tensor-core products.

Works on the cubin that Triton leaves, with the cuobjdump that Triton brings; needs no GPU.
"""

import re
import subprocess
import tempfile
from typing import NamedTuple

import triton


_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
# HMMA (warps), HGMMA (groups of four warps), UTCHMMA (Blackwell), and their kin for other types.
_TENSOR_CORE = re.compile(r"(UTC)?[A-Z]*MMA(\.|$)")


class Figures(NamedTuple):
    """Registers per thread, stack in bytes, and counts of instructions in the machine code."""

    registers: int
    stack: int
    spill_stores_in_loops: int
    spill_loads_in_loops: int
    spill_stores_outside: int
    spill_loads_outside: int
    tensor_instructions: int
    instructions: int


class _Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str
    operands: str


def analyse(cubin: bytes) -> Figures:
    """The figures of a cubin with one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _USAGE.search(_cuobjdump("-res-usage", file.name))
        code = [_Instruction(int(i[0], 16), *i[1:]) for i in _INSTRUCTION.findall(_cuobjdump("-sass", file.name))]
    looped = _inside_loops(code)

    def count(opcode: str, inside: bool) -> int:
        return sum(i.opcode.split(".")[0] == opcode and (i.address in looped) == inside for i in code)

    return Figures(
        int(usage[1]),
        int(usage[2]),
        count("STL", True),
        count("LDL", True),
        count("STL", False),
        count("LDL", False),
        sum(_TENSOR_CORE.match(i.opcode) is not None for i in code),
        len(code),
    )


def _cuobjdump(option: str, path: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _inside_loops(code: list[_Instruction]) -> set[int]:
    """The addresses of instructions inside a loop.

    A branch backwards alone makes no loop: waiting code, for one, lies behind the kernel's end and branches back into
    it. A loop is what can reach an edge whose target dominates its source.
    """
    starts, successors = _blocks(code)
    predecessors = [[p for p, follow in enumerate(successors) if s in follow] for s in range(len(starts))]
    dominators = _dominators(predecessors)
    inside = set()
    for source in _reachable(successors):
        for target in successors[source]:
            if dominators[source] >> target & 1:
                inside |= _natural_loop(source, target, predecessors)
    ends = [*starts[1:], len(code)]
    return {code[i].address for block in inside for i in range(starts[block], ends[block])}


def _blocks(code: list[_Instruction]) -> tuple[list[int], list[list[int]]]:
    """Basic blocks: the index of each one's first instruction, and the blocks that follow it."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    jumps = {i: _target(x) for i, x in enumerate(code) if x.opcode.split(".")[0] == "BRA"}
    ends = {i for i, x in enumerate(code) if i in jumps or x.opcode.split(".")[0] in ("EXIT", "RET")}
    leaders = {0} | {i + 1 for i in ends if i + 1 < len(code)} | {index[a] for a in jumps.values()}
    starts = sorted(leaders)
    block_at = {start: block for block, start in enumerate(starts)}
    successors = []
    for block in range(len(starts)):
        last = (starts[block + 1] if block + 1 < len(starts) else len(code)) - 1
        follow = []
        if last in jumps:
            follow.append(block_at[index[jumps[last]]])
        if (last not in ends or _is_conditional(code[last])) and last + 1 < len(code):
            follow.append(block + 1)
        successors.append(follow)
    return starts, successors


def _target(branch: _Instruction) -> int:
    return int(re.search(r"0x([0-9a-f]+)$", branch.operands)[1], 16)


def _is_conditional(instruction: _Instruction) -> bool:
    return bool(instruction.predicate) or "," in instruction.operands


def _reachable(successors: list[list[int]]) -> set[int]:
    reached, left = {0}, [0]
    while left:
        new = [block for block in successors[left.pop()] if block not in reached]
        reached.update(new)
        left.extend(new)
    return reached


def _dominators(predecessors: list[list[int]]) -> list[int]:
    """For each block the set of blocks, as bits, that every way to it passes; for an unreachable one, all blocks."""
    everything = (1 << len(predecessors)) - 1
    dominators = [1, *[everything] * (len(predecessors) - 1)]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(predecessors)):
            common = everything
            for predecessor in predecessors[block]:
                common &= dominators[predecessor]
            common |= 1 << block
            changed |= common != dominators[block]
            dominators[block] = common
    return dominators


def _natural_loop(source: int, target: int, predecessors: list[list[int]]) -> set[int]:
    loop, left = {target, source}, [source]
    while left:
        block = left.pop()
        if block == target:
            continue
        new = [p for p in predecessors[block] if p not in loop]
        loop.update(new)
        left.extend(new)
    return loop
