# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Two processes: data parallel and fully sharded training and decoding equal one process with all rows.

Two processes run all cases, one after another; a case leaves a file behind, which its test compares with what this
process computes alone. Gloo and the CPU do; accelerate would fall back from sharding to plain DDP there, so the
sharded runs use torch's own function.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from titans_testing import TOLERANCE, assert_close, iterate_floats, logits_of, random_ids
from transformers_titans import TitansCache
from variant_oracle import VARIANTS, variant_model


F64 = torch.float64
NUM_PROCESSES = 2
SAMPLING = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
# Chunks have four tokens: windows that end before the first is full, and windows of several.
WINDOWS = {"below_a_chunk": (3, 3), "many_chunks": (9, 6)}
LENGTH = 15
# Without persistent tokens the state of a memory that has read less than a chunk is its start weights.
SHARDED = {
    "default": {},
    "persistent_0": {"num_persistent_tokens": 0},
    "forget_to_start": {"memory_forget_to": "start"},
    "recomputed": {},
}
HALF = {"default": {}}
TRAINED = [*VARIANTS, "lmm_grm", "mag_soup"]
# Start weights are a matter of the memory, which is the same in each: with attention beside it, and with caching.
SOME = ["mac", "lmm_grm"]


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in the logits' own dtype; transformers' loss function computes in float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rows_of(rank: int, ids: torch.Tensor) -> torch.Tensor:
    return ids.chunk(NUM_PROCESSES)[rank]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def named_gradients(model) -> dict[str, torch.Tensor]:
    gradients = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        raise RuntimeError(f"no gradient for {missing}")
    return {name: whole(gradient) for name, gradient in gradients.items()}


def train_over_windows(model, config, ids: torch.Tensor, lengths: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """Steps of gradient descent over a text in windows, the memory carried on; each window's gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cache, gradients = TitansCache(config), []
    model.train()
    for window in ids.split(lengths, 1):
        loss = next_token_loss(model(window, cache=cache).logits, window)
        optimizer.zero_grad()
        loss.backward()
        gradients.append(named_gradients(model))
        optimizer.step()
        cache.detach()
    model.eval()
    return gradients


def read_and_generate(model, config, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of one call, of a text in two calls that end inside a chunk, and greedy tokens."""
    cache = TitansCache(config)
    parts = [logits_of(model, part, cache=cache) for part in ids.split([3, ids.shape[1] - 3], 1)]
    return {
        "one call": logits_of(model, ids),
        "two calls": torch.cat(parts, 1),
        "generated": model.generate(ids, **SAMPLING),
    }


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(NUM_PROCESSES)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def run_data_parallel(variant: str, case: str) -> dict:
    model = variant_model(variant, dtype=F64)
    ids = rows_of(dist.get_rank(), random_ids(4, sum(WINDOWS[case])))
    return {"gradients": train_over_windows(DistributedDataParallel(model), model.config, ids, WINDOWS[case])}


def shard(model, **options):
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    unsharded = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if unsharded:
        raise RuntimeError(f"not sharded: {unsharded}")
    return model


def run_sharded(variant: str, case: str) -> dict:
    model = variant_model(variant, dtype=F64, **SHARDED[case])
    if case == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model)
    ids = rows_of(dist.get_rank(), random_ids(4, LENGTH))
    gradients = train_over_windows(model, model.config, ids, WINDOWS["many_chunks"])
    outputs = read_and_generate(model, model.config, ids)
    return {"gradients": gradients, **{name: gather_rows(tensor) for name, tensor in outputs.items()}}


def run_sharded_in_bfloat16(variant: str, case: str) -> dict:
    # As accelerate sets it, but for the gradients' sum.
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    model = shard(variant_model(variant, **HALF[case]), mp_policy=policy)
    ids = rows_of(dist.get_rank(), random_ids(4, LENGTH))
    outputs = read_and_generate(model, model.config, ids)
    cache = TitansCache(model.config)
    logits_of(model, ids, cache=cache)
    memories = [tensor for layer in cache.layers for tensor in iterate_floats(layer.state.memory.memory)]
    gradients = train_over_windows(model, model.config, ids, WINDOWS["many_chunks"])
    return {"gradients": gradients, "dtypes": {tensor.dtype for tensor in memories}, **outputs}


RUNS = {
    "data_parallel": (run_data_parallel, [(variant, case) for variant in TRAINED for case in WINDOWS]),
    "sharded": (
        run_sharded,
        [(v, case) for v in TRAINED for case in SHARDED if v in SOME or case in ("default", "recomputed")],
    ),
    "sharded_in_bfloat16": (run_sharded_in_bfloat16, [(variant, case) for variant in TRAINED for case in HALF]),
}


def cases_of(kind: str):
    return pytest.mark.parametrize(("variant", "case"), RUNS[kind][1])


def run_all(rank: int, folder: str) -> None:
    """What each process does: all cases; the first process writes the results down."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/processes"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_PROCESSES)
    for kind, (run, cases) in RUNS.items():
        for variant, case in cases:
            torch.manual_seed(0)
            results = run(variant, case)
            if rank == 0:
                torch.save(results, Path(folder) / f"{kind}-{variant}-{case}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function (kind, variant, case) -> results of two processes."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, __file__, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)

    def get(kind: str, variant: str, case: str) -> dict:
        path = folder / f"{kind}-{variant}-{case}.pt"
        assert path.exists(), f"the processes left no result; they said:\n{run.stderr[-6000:]}"
        return torch.load(path)

    return get


def assert_same_gradients(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for window, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, gradient in other.items():
            assert_close(f"{name} in window {window}", one[name], gradient, TOLERANCE[F64])


@cases_of("data_parallel")
def test_data_parallel_gradients_are_those_of_all_rows(variant, case, results_of):
    # DDP refuses the second step if a parameter had no gradient in the first: nothing tells it to look for those.
    results = results_of("data_parallel", variant, case)
    model = variant_model(variant, dtype=F64)
    expected = train_over_windows(model, model.config, random_ids(4, sum(WINDOWS[case])), WINDOWS[case])
    assert_same_gradients(results["gradients"], expected)


@cases_of("sharded")
def test_sharded_model_trains_reads_and_generates_as_a_whole_one(variant, case, results_of):
    results = results_of("sharded", variant, case)
    model = variant_model(variant, dtype=F64, **SHARDED[case])
    ids = random_ids(4, LENGTH)
    assert_same_gradients(results["gradients"], train_over_windows(model, model.config, ids, WINDOWS["many_chunks"]))
    expected = read_and_generate(model, model.config, ids)
    for name in ("one call", "two calls"):
        assert_close(name, results[name], expected[name], TOLERANCE[F64])
    assert_close("two calls and one", results["two calls"], results["one call"], TOLERANCE[F64])
    assert torch.equal(results["generated"], expected["generated"])


@cases_of("sharded_in_bfloat16")
def test_sharded_model_in_bfloat16_carries_a_float32_memory(variant, case, results_of):
    # FSDP casts all floats that it finds in a layer's arguments and results: states, and the angles of positions.
    results = results_of("sharded_in_bfloat16", variant, case)
    assert results["dtypes"] == {torch.float32}
    assert all(gradient.isfinite().all() for window in results["gradients"] for gradient in window.values())
    model = variant_model(variant, dtype=torch.bfloat16)
    expected = read_and_generate(model, model.config, rows_of(0, random_ids(4, LENGTH)))
    for name in ("one call", "two calls"):
        assert results[name].dtype == torch.bfloat16
        assert_close(name, results[name], expected[name], TOLERANCE[torch.bfloat16])
    assert torch.equal(results["generated"], expected["generated"])


if __name__ == "__main__":
    # Copies of this process need not import all that it has imported.
    start_processes(run_all, (sys.argv[1],), NUM_PROCESSES, start_method="fork")
