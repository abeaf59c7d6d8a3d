# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The figures of `gpu.py` as a page."""

from collections.abc import Iterable
from typing import Any


def markdown(results: dict[str, Any]) -> str:
    """The page; sections of stages that have not run yet are left out."""
    origin, rates = results["origin"], results["rates"]
    lines = [
        f"# The Triton kernels on {origin['card']}",
        "",
        f"Made by `python benchmarks/gpu.py` on {origin['date']}: torch {origin['torch']}, Triton {origin['triton']}, "
        f"CUDA {origin['cuda']}, commit {origin['commit']}.",
        "",
        f"Measured here: {rates['matrix_flops'] / 1e12:.0f} TFLOP/s in a bfloat16 product of 8192 x 8192 matrices, "
        f"{rates['copy_bytes'] / 1e12:.2f} TB/s in a copy, read and written.",
        "",
        *_checks(results["checks"]),
    ]
    sections = {"scans": _scans, "decoding": _decoding, "sweep": _sweep, "peers": _peers, "compiled": _compiled}
    for name, section in sections.items():
        if name in results:
            lines += ["", *section(results)]
        elif name in results["failed"]:
            lines += ["", f"The stage {name!r} failed: {results['failed'][name]}"]
    return "\n".join(lines) + "\n"


def _table(columns: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _checks(checks: list[dict[str, Any]]) -> list[str]:
    right = [check for check in checks if check["problem"] is None]
    lines = [
        "## Are they right?",
        "",
        f"Forward, every gradient and decoding against the chunked form in float64: {len(right)} of {len(checks)} "
        "cases are. A case is a memory, a dtype and a configuration of every kernel; three chunks of 64, head "
        "dimension 64. Largest relative error of the right ones:",
        "",
    ]
    rows = []
    for dtype in sorted({check["case"]["dtype"] for check in checks}):
        errors = [max(check["errors"].values()) for check in right if check["case"]["dtype"] == dtype]
        allowed = next(check["allowed"] for check in checks if check["case"]["dtype"] == dtype)
        rows.append((dtype, len(errors), f"{max(errors):.1e}" if errors else "-", f"{allowed:.1e}"))
    lines += _table(("dtype", "right cases", "largest error", "allowed"), rows)
    rest = [check for check in checks if check["problem"] is not None]
    if rest:
        rows = [(*_case(check["case"]), _worst(check), check["problem"]) for check in rest]
        lines += ["", *_table(("memory", "dtype", "configuration", "largest error", "problem"), rows)]
    return lines


def _case(case: dict[str, Any]) -> tuple[str, str, str]:
    config = "default" if case["config"] is None else str(case["config"])
    memory = case["memory"] + (", plain" if case["plain"] else "")
    rule = "" if case["rule"] == "titans" else f", {case['rule']}"
    return memory + rule, case["dtype"], config + (", rules" if case["rules"] else "")


def _worst(check: dict[str, Any]) -> str:
    return f"{max(check['errors'].values()):.1e}" if check["errors"] else "-"


def _direction(row: dict[str, Any]) -> str:
    return "forward + backward" if row["backward"] else "forward"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _timed(row: dict[str, Any], ours: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Time, tokens per second, peak memory and our kernels' speed over this row's."""
    if "seconds" not in row:
        return row.get("problem", ""), "", "", ""
    rate = f"{row['tokens'] * row['groups'] / row['seconds'] / 1e6:.1f}"
    ratio = f"{row['seconds'] / ours['seconds']:.2f}" if ours and "seconds" in ours else ""
    return _time(row["seconds"]), rate, f"{row['peak_bytes'] / 2**20:.0f}", ratio


def _ours(results: dict[str, Any], row: dict[str, Any], memory: str) -> dict[str, Any] | None:
    """Our kernels' row of the same size and direction."""
    wanted = {"form": "triton", "memory": memory} | {name: row[name] for name in ("tokens", "groups", "backward")}
    rows = [*results.get("scans", ()), *results.get("compiled", ())]
    return next((r for r in rows if all(r.get(name) == value for name, value in wanted.items())), None)


def _scans(results: dict[str, Any]) -> list[str]:
    rows = []
    for row in results["scans"]:
        share = f"{100 * row['of_matrix_rate']:.1f} %" if "of_matrix_rate" in row else ""
        sizes = (row["form"], row["memory"], row["tokens"], row["groups"], _direction(row))
        rows.append((*sizes, *_timed(row, _ours(results, row, row["memory"])), share))
    columns = (
        "form",
        "memory",
        "T",
        "B * H",
        "",
        "time",
        "million tokens * heads / s",
        "peak MiB",
        "by triton's time",
    )
    return [
        "## Times",
        "",
        "Head dimension 64, chunks of 64, products in bfloat16. chunked: the PyTorch form, eager. Last column: useful "
        "operations, the backward's recomputation included, by the matrix rate above.",
        "",
        *_table((*columns, "of the matrix rate"), rows),
    ]


def _decoding(results: dict[str, Any]) -> list[str]:
    rows = []
    for row in results["decoding"]:
        if "problem" in row:
            rows.append((row["memory"], row["groups"], row["problem"], "", "", "", ""))
            continue
        times = [_time(row[f"{form}{kind}_seconds"]) for form in ("triton", "chunked") for kind in ("", "_graph")]
        rows.append((row["memory"], row["groups"], *times, f"{100 * row['of_copy_bandwidth']:.0f} %"))
    columns = ("memory", "B * H", "triton", "triton, graph", "chunked", "chunked, graph", "of the copy bandwidth")
    return [
        "## One token",
        "",
        "The last slot of an open chunk of 64. Graph: replayed as a CUDA graph, without Python's time. Bandwidth: the "
        "state and the chunk's tokens read once, by the time in a graph.",
        "",
        *_table(columns, rows),
    ]


def _sweep(results: dict[str, Any]) -> list[str]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["sweep"]:
        groups.setdefault((row["memory"], row["kernel"]), []).append(row)
    rows = []
    for (memory, kernel), found in groups.items():
        best = min(found, key=lambda row: row["seconds"])
        default = next((row for row in found if row["is_default"]), None)
        times = ", ".join(f"{tuple(row['config'])} {_time(row['seconds'])}" for row in found)
        loss = f"{default['seconds'] / best['seconds']:.2f}" if default else "default not measured"
        rows.append((memory, kernel, tuple(best["config"]), loss, times))
    return [
        "## Configurations",
        "",
        "Time of each kernel in one forward and backward at the first size above (decode: 1024 rows times heads) by "
        "(tile, warps, stages, tokens).",
        "",
        *_table(("memory", "kernel", "best", "default by best", "all"), rows),
    ]


def _peers(results: dict[str, Any]) -> list[str]:
    rows = []
    for row in results["peers"]:
        ratios = [_timed(row, _ours(results, row, memory))[3] for memory in ("h256", "h128", "depth1")]
        rows.append((row["form"], _direction(row), *_timed(row)[:3], *ratios))
    columns = ("operator", "", "time", "million tokens * heads / s", "peak MiB")
    return [
        "## Peers",
        "",
        "As many tokens, heads and features as in the first size above, bfloat16. None computes the same; the last "
        "columns are their time by ours.",
        "",
        *_table((*columns, "by h256", "by h128", "by depth1"), rows),
    ]


def _compiled(results: dict[str, Any]) -> list[str]:
    rows = []
    for row in results["compiled"]:
        rows.append((row["form"], _direction(row), *_timed(row, _ours(results, row, "h256"))))
    return [
        "## torch.compile of the chunked form",
        "",
        "1024 tokens of 64 rows times heads, two layers, h = 256.",
        "",
        *_table(("form", "", "time", "million tokens * heads / s", "peak MiB", "by triton's time"), rows),
    ]
