# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws what the other programs have recorded in results/: ``python benchmarks/plots.py``.

From context.json decoding.png and prefill.png, from caching.json caching.png and caching_decoding.png, from
extrapolation.json extrapolation.png.
"""

import json

from timing import RESULTS


try:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator
except ImportError as error:
    raise SystemExit(f'{error}; pip install "transformers-titans[bench]"') from error


# Ours in warm colours and full lines, the others in cold ones, broken; colours that the colour-blind can tell apart.
STYLES = {
    "lmm": ("Titans lmm", "#d55e00", "o", "-"),
    "mac": ("Titans mac", "#e69f00", "s", "-"),
    "no caching": ("no caching", "#d55e00", "o", "-"),
    "SSC": ("SSC", "#e69f00", "s", "-"),
    "GRM": ("GRM", "#cc79a7", "D", "-"),
    "Log-Linear++": ("Log-Linear++", "#999933", "P", "-"),
    "Llama": ("Llama", "#0072b2", "^", "--"),
    "Mamba2": ("Mamba2", "#009e73", "v", "--"),
}


def _panel(axes, title: str, unit: str, curves: dict[str, dict[str, float]]) -> None:
    """One curve by name, each value by context length."""
    lengths: set[int] = set()
    for name, values in curves.items():
        label, colour, marker, line = STYLES[name]
        points = sorted((int(length), value) for length, value in values.items())
        lengths |= {length for length, _ in points}
        axes.plot(*zip(*points, strict=True), line, marker=marker, color=colour, label=label, linewidth=2)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=unit, title=title)
    ticks = sorted(lengths) if len(lengths) < 6 else sorted(lengths)[::2]
    axes.set_xticks(ticks, [f"{length // 1024}k" for length in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(alpha=0.3)


def _figure(file: str, *panels: tuple[str, str, dict]) -> None:
    with pyplot.rc_context({"font.size": 12, "axes.titlesize": 13}):
        figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 4), layout="constrained")
        for one, panel in zip(axes, panels, strict=True):
            _panel(one, *panel)
        axes[0].legend()
        figure.savefig(RESULTS / file, dpi=100)
        pyplot.close(figure)


def draw() -> None:
    """The plots of whatever has been recorded."""
    plots = {"context": _draw_context, "caching": _draw_caching, "extrapolation": _draw_extrapolation}
    for name, plot in plots.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            plot(json.loads(file.read_text(encoding="utf-8")))


def _draw_context(results: dict) -> None:
    _figure("decoding.png", *_decoding_panels(results["decoding"]))
    prefill = results["prefill"]
    rates = {name: {n: f["tokens per second"] for n, f in figures.items()} for name, figures in prefill.items()}
    peaks = {name: _megabytes({n: f["peak bytes"] for n, f in figures.items()}) for name, figures in prefill.items()}
    panels = (
        ("Reading in calls of 2,048", "tokens per second", rates),
        ("Peak memory above the model's", "MB", peaks),
    )
    _figure("prefill.png", *panels)


def _draw_caching(results: dict) -> None:
    training = results["training"]
    rates = {
        name: {n: spread[0] for n, spread in spreads.items()}
        for name, spreads in training["tokens per second"].items()
    }
    peaks = {name: _megabytes(values) for name, values in training["peak bytes"].items()}
    _figure("caching.png", ("Training", "tokens per second", rates), ("Peak memory above the model's", "MB", peaks))
    _figure("caching_decoding.png", *_decoding_panels(results["decoding"]))


def _decoding_panels(decoding: dict) -> tuple[tuple[str, str, dict], ...]:
    rates = {
        name: {length: 1e3 / spread[0] for length, spread in spreads.items()}
        for name, spreads in decoding["milliseconds per token"].items()
    }
    sizes = {name: _megabytes(values) for name, values in decoding["cache bytes"].items()}
    return ("Decoding", "tokens per second", rates), ("State behind the context", "MB", sizes)


def _draw_extrapolation(results: dict) -> None:
    """The loss by position, and where training ended."""
    with pyplot.rc_context({"font.size": 12}):
        figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
        for name, reader in results["readers"].items():
            position = [results["bin"] * (n + 0.5) for n in range(len(reader["curve"]))]
            axes.plot(position, reader["curve"], label=name, linewidth=2)
        axes.axvline(results["training length"], color="black", linewidth=1, linestyle=":", label="training length")
        axes.set(xlabel="position, bytes", ylabel="loss, nats per byte", title="Past the training length")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(RESULTS / "extrapolation.png", dpi=100)
        pyplot.close(figure)


def _megabytes(values: dict[str, float]) -> dict[str, float]:
    return {length: value / 1e6 for length, value in values.items()}


if __name__ == "__main__":
    draw()
