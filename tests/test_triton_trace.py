# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile takes the Triton kernels without a break in the graph, which needs no GPU to see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

# What a process traces in which kernels are not interpreted: prints the launches in each graph.
TRACE = """
import json

import torch
import torch.utils._triton

# As where there is a GPU: the tracer keeps a launch as a node of the graph instead of looking into Triton.
torch.utils._triton.has_triton = torch.utils._triton.has_triton_package = lambda: True

from transformers_titans import triton_launch

triton_launch.capability_of = lambda tensor: (9, 0)

from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from transformers_titans.memory_ops_triton import triton_scan
from transformers_titans.triton_decode import decode
from triton_testing import in_dtype, scan_inputs, scan_options


def launches(function, *arguments):
    found = []

    def count(module, example_inputs):
        graphs = [m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
        found.extend(n for g in graphs for n in g.nodes if n.target is triton_kernel_wrapper_mutation)
        raise NotImplementedError

    torch._dynamo.reset()
    try:
        torch.compile(function, backend=count, fullgraph=True)(*arguments)
    except torch._dynamo.exc.BackendCompilerFailed:
        return len(found)


def scan(*flat):
    return triton_scan(type(inputs).unflatten(flat, 2), options)


def read(*flat):
    return decode(type(query).unflatten(flat, 2), read_options, torch.zeros(2, dtype=torch.int32))


inputs = in_dtype(scan_inputs(restart=True, full=True), torch.bfloat16)
options = scan_options(inputs)
query = in_dtype(scan_inputs(N=1, b_q=1), torch.bfloat16)
read_options = scan_options(query, write=False, surprise=False)
counts = {"forward": launches(scan, *inputs.flatten()), "decode": launches(read, *query.flatten())}
for t in inputs.flatten():
    if t is not None and t.is_floating_point():
        t.requires_grad_()
counts["training"] = launches(scan, *inputs.flatten())
print(json.dumps(counts))
"""


def test_kernels_are_traced_without_a_break():
    """Coefficients, writer and reader; a backward of coefficients, factors and three adjoints; one to decode."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"forward": 3, "decode": 1, "training": 8}
