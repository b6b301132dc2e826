#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A roofline as SVG from the results of bench/peers/run.py.

    bench/picture.py RESULTS.json -o roofline.svg

Across: useful operations for each byte of keys and values. Up: operations a
second. The roofs are what qkv-bench measured in the same rounds: reading
the same keys and values (the sloping lines) and multiplying and adding (the
level one). Needs nothing but Python.
"""
import argparse
import json
import math
import statistics
from html import escape

WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 50, 60
COLOURS = ("#c2410c", "#2563eb", "#15803d", "#7c3aed", "#737373")
X_LOW, X_HIGH = 0.25, 4096


class Plot:
    """Logarithmic axes and the elements drawn so far."""

    def __init__(self, y_low, y_high):
        self.y_low, self.y_high = y_low, y_high
        self.parts = []

    def x(self, value):
        share = math.log(value / X_LOW) / math.log(X_HIGH / X_LOW)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        share = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def line(self, x1, y1, x2, y2, colour, width=1.0, dash=None):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}" stroke-width="{width}"{dashes}/>'
        )

    def text(self, x, y, text, anchor="start", size=12, colour="#333", turn=None):
        turned = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn is not None else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}"{turned}>{escape(text)}</text>'
        )

    def marker(self, x, y, colour, ours, title=""):
        shape = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}" stroke="#fff"'
            if ours
            else f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="#fff" fill-opacity="0.6" '
            f'stroke="{colour}" stroke-width="2"'
        )
        self.parts.append(f"{shape}><title>{escape(title)}</title></circle>")

    def svg(self):
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="sans-serif">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
            f"{body}\n</svg>\n"
        )


def intensity(result):
    return result["gflops"] / result["gbps"]


def draw_axes(plot):
    value = X_LOW
    while value <= X_HIGH:
        x = plot.x(value)
        plot.line(x, TOP, x, HEIGHT - BOTTOM, "#eee")
        plot.text(x, HEIGHT - BOTTOM + 18, f"{value:g}", "middle")
        value *= 4
    value = plot.y_low
    while value <= plot.y_high * 1.001:
        y = plot.y(value)
        plot.line(LEFT, y, WIDTH - RIGHT, y, "#eee")
        plot.text(LEFT - 8, y + 4, f"{value:g}", "end")
        value *= 2
    middle = (LEFT + WIDTH - RIGHT) / 2
    plot.text(middle, HEIGHT - 16, "useful operations for each byte of keys and values", "middle")
    plot.text(20, (TOP + HEIGHT - BOTTOM) / 2, "GFLOP/s", "middle", turn=-90)


def draw_roofs(plot, results):
    """The level roof, and the highest and lowest of the sloping ones."""
    peaks = [r["limit_rate"] for r in results if r["limit"] == "fma"]
    peak = statistics.median(peaks) if peaks else plot.y_high
    reads = sorted({(r["limit_rate"], r["shape"]) for r in results if r["limit"] == "read"})
    for rate, shape in {reads[0], reads[-1]} if reads else ():
        begin, end = max(X_LOW, plot.y_low / rate), peak / rate
        plot.line(plot.x(begin), plot.y(begin * rate), plot.x(end), plot.y(peak), "#555", 1.5)
        dx, dy = plot.x(end) - plot.x(begin), plot.y(peak) - plot.y(begin * rate)
        at = begin * (end / begin) ** 0.5
        angle = math.degrees(math.atan2(dy, dx))
        label = f"read {rate:.0f} GB/s ({shape})"
        plot.text(plot.x(at), plot.y(at * rate) - 6, label, "middle", 11, turn=angle)
    begin = peak / reads[-1][0] if reads else X_LOW
    plot.line(plot.x(begin), plot.y(peak), WIDTH - RIGHT, plot.y(peak), "#555", 1.5)
    label = f"multiply-add {peak:.0f} GFLOP/s"
    plot.text(WIDTH - RIGHT - 4, plot.y(peak) - 6, label, "end", 11)


def draw_points(plot, results, libraries):
    for r in sorted(results, key=lambda r: r["library"] == "qkv"):
        title = (
            f"{r['library']}, {r['shape']}: {r['gflops']:.1f} GFLOP/s, "
            f"{100 * r['fraction']:.0f} % of the limit"
        )
        x, y = plot.x(intensity(r)), plot.y(r["gflops"])
        plot.marker(x, y, libraries[r["library"]], r["library"] == "qkv", title)
    names = {}
    for r in results:
        names.setdefault(round(plot.x(intensity(r))), {})[r["shape"]] = None
    draw_names(plot, names)


def draw_names(plot, names):
    """The shapes above the axis, one line up where the last one is too near."""
    last, level = -math.inf, 0
    for x, shapes in sorted(names.items()):
        level = level if x - last < 36 else 0
        for shape in shapes:
            plot.text(x, HEIGHT - BOTTOM - 6 - 12 * level, shape, "middle", 10, "#888")
            level += 1
        last = x


def draw_legend(plot, libraries, results):
    for i, (library, colour) in enumerate(libraries.items()):
        y = TOP + 16 + 22 * i
        plot.marker(WIDTH - RIGHT + 24, y - 4, colour, library == "qkv")
        plot.text(WIDTH - RIGHT + 38, y, library)
    plot.text(LEFT, 24, "f32 attention, one thread", size=15)
    plot.text(LEFT, 41, f"{results[0]['cpu']}; medians of {results[0]['rounds']} rounds", size=11)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results")
    parser.add_argument("-o", "--out", required=True)
    args = parser.parse_args()
    with open(args.results, encoding="utf-8") as file:
        results = json.load(file)
    rates = [r["gflops"] for r in results]
    roof = max([r["limit_rate"] for r in results if r["limit"] == "fma"] + rates)
    low = 2.0 ** math.floor(math.log2(min(rates)) - 0.7)
    plot = Plot(low, 2.0 ** math.ceil(math.log2(roof * 1.1)))
    names = sorted({r["library"] for r in results}, key=lambda name: (name != "qkv", name))
    libraries = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    draw_axes(plot)
    draw_roofs(plot, results)
    draw_points(plot, results, libraries)
    draw_legend(plot, libraries, results)
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(plot.svg())


if __name__ == "__main__":
    main()
