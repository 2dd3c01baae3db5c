"""One curve as an SVG file, on logarithmic axes: what noise costs and what it buys."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 60, 90


@dataclass(frozen=True)
class Point:
    """``values`` of all seeds at ``x``; ``note`` is written below the axis there."""

    x: float
    values: tuple[float, ...]
    note: str = ""

    @property
    def mean(self) -> float:
        """Geometric, as ratios are averaged."""
        return math.exp(sum(map(math.log, self.values)) / len(self.values))


def draw(
    path: Path, points: Sequence[Point], words: tuple[str, str, str], levels: Mapping[str, float]
) -> None:
    """Write ``points`` with ``words`` (title, x, y), and a line at each of ``levels``, by name."""
    everything = [value for point in points for value in point.values] + list(levels.values())
    low, high = math.log10(min(everything)) - 0.05, math.log10(max(everything)) + 0.05
    first, last = math.log10(points[0].x), math.log10(points[-1].x)

    def across(x: float) -> float:
        part = (math.log10(x) - first) / ((last - first) or 1.0)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        part = (math.log10(y) - low) / (high - low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, said: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(said)}</text>'

    base = HEIGHT - BOTTOM
    middle = 'text-anchor="middle"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<g font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(WIDTH / 2, 28, words[0], f'{middle} font-size="16"'),
        text(WIDTH / 2, HEIGHT - 14, words[1], middle),
        f'<g transform="rotate(-90 20 {HEIGHT / 2})">{text(20, HEIGHT / 2, words[2], middle)}</g>',
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="black"/>',
    ]
    for name, level in levels.items():
        dashed = f'd="M{LEFT} {up(level):.1f}H{WIDTH - RIGHT}" stroke-dasharray="5 4"'
        parts.append(f'<path {dashed} stroke="gray"/>')
        end = 'text-anchor="end" fill="gray" font-size="11"'
        parts.append(text(WIDTH - RIGHT, up(level) - 5, name, end))
    for tick in (0.2, 0.3, 0.5, 0.7, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000):
        if low <= math.log10(tick) <= high:
            parts.append(f'<path d="M{LEFT - 5} {up(tick):.1f}H{LEFT}" stroke="black"/>')
            parts.append(text(LEFT - 9, up(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    tops = " ".join(f"{across(p.x):.1f},{up(max(p.values)):.1f}" for p in points)
    feet = " ".join(f"{across(p.x):.1f},{up(min(p.values)):.1f}" for p in reversed(points))
    parts.append(f'<polygon points="{tops} {feet}" fill="#3b74b8" fill-opacity="0.2"/>')
    line = " ".join(f"{across(p.x):.1f},{up(p.mean):.1f}" for p in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#3b74b8" stroke-width="2"/>')
    for point in points:
        at = across(point.x)
        parts.append(f'<circle cx="{at:.1f}" cy="{up(point.mean):.1f}" r="4" fill="#3b74b8"/>')
        parts.append(text(at, base + 20, f"{point.x:g}", middle))
        parts.append(text(at, base + 38, point.note, f'{middle} fill="gray" font-size="11"'))
    path.write_text("\n".join([*parts, "</g></svg>", ""]))
