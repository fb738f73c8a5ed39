"""Small SVG drawings for the report: text in, text out, nothing loaded from anywhere."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 36
BAR_SHARE = 0.7
TICKS = 4
POINTS_MARKED_MAX = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart: points in the order of x, drawn in colour number ``colour``."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    is_faint: bool = False


def line_chart(
    series: Sequence[Series], *, label: str, x_label: str, unit: str = "", from_zero: bool = True
) -> str:
    """Draw lines over a common x; an empty chart says so."""
    points = [point for one in series for point in one.points]
    if not points:
        return _nothing(label)
    scale = _Scale.around(points, from_zero=from_zero)
    drawn = [_axes(scale, x_label=x_label, unit=unit)]
    drawn += [_line(one, scale, unit) for one in series]
    return _svg(label, drawn) + _legend(series)


def bar_chart(
    bars: Sequence[tuple[float, float]], reference: Series, *, label: str, x_label: str, unit: str
) -> str:
    """Draw one bar per (x, height) under the line of what they are measured against."""
    if not bars:
        return _nothing(label)
    scale = _Scale.around([*bars, *reference.points], from_zero=True, margin=0.5)
    width = (WIDTH - LEFT - RIGHT) / max(1.0, scale.x_max - scale.x_min) * BAR_SHARE
    width = max(1.0, min(40.0, width))
    floor = scale.y(0.0)
    drawn = [_axes(scale, x_label=x_label, unit=unit)]
    for x, height in bars:
        top = min(scale.y(height), floor - 0.75)
        drawn.append(
            f'<rect class="s0 bar" x="{scale.x(x) - width / 2:.1f}" y="{top:.1f}" '
            f'width="{width:.1f}" height="{floor - top:.1f}">'
            f"<title>{x:g}: {_tick(height, unit)}</title></rect>"
        )
    drawn.append(_line(reference, scale, unit))
    return _svg(label, drawn) + _legend([Series(name=label, points=(), colour=0), reference])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    x_min: float
    x_max: float
    y_min: float
    y_max: float
    step: float

    @classmethod
    def around(
        cls, points: Iterable[tuple[float, float]], *, from_zero: bool, margin: float = 0.0
    ) -> "_Scale":
        found = list(points)
        xs, ys = [x for x, _ in found], [y for _, y in found]
        low = min([0.0, *ys]) if from_zero else min(ys)
        high = max(ys)
        step = _nice((high - low) / TICKS or abs(high) / TICKS or 1.0)
        return cls(
            x_min=min(xs) - margin,
            x_max=max(xs) + margin,
            y_min=math.floor(low / step) * step,
            y_max=max(math.ceil(high / step), math.floor(low / step) + 1) * step,
            step=step,
        )

    def x(self, value: float) -> float:
        span = self.x_max - self.x_min or 1.0
        return LEFT + (value - self.x_min) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / (self.y_max - self.y_min)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _nice(step: float) -> float:
    """Round a tick distance up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= step * 0.999)


def _axes(scale: _Scale, *, x_label: str, unit: str) -> str:
    parts = []
    for index in range(round((scale.y_max - scale.y_min) / scale.step) + 1):
        value = scale.y_min + index * scale.step
        y = scale.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(value, unit)}</text>'
        )
    for value in _x_ticks(math.ceil(scale.x_min), math.floor(scale.x_max)):
        x = scale.x(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{value}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = escape(x_label)
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 3}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _x_ticks(first: int, last: int) -> range:
    return range(first, last + 1, max(1, math.ceil((last - first) / 12)))


def _line(series: Series, scale: _Scale, unit: str) -> str:
    css = f"s{series.colour % 6}" + (" faint" if series.is_faint else "")
    path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in series.points)
    marks = ""
    if len(series.points) <= POINTS_MARKED_MAX and not series.is_faint:
        name = escape(series.name)
        marks = "".join(
            f'<circle class="{css}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.5">'
            f"<title>{name}, {x:g}: {_tick(y, unit)}</title></circle>"
            for x, y in series.points
        )
    return f'<polyline class="{css}" points="{path}"/>{marks}'


def _tick(value: float, unit: str) -> str:
    if unit == "B":
        return bytes_text(value)
    text = f"{value:.4g}" if abs(value) < 1e6 else f"{value:.2e}"  # noqa: PLR2004
    return f"{text} {escape(unit)}" if unit else text


def bytes_text(value: float) -> str:
    """Return a count of bytes as people read it, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:  # noqa: PLR2004
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def _svg(label: str, drawn: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(drawn)
        + "</svg>"
    )


def _legend(series: Sequence[Series]) -> str:
    items = "".join(
        f'<span><i class="s{one.colour % 6}{" faint" if one.is_faint else ""}"></i>'
        f"{escape(one.name)}</span>"
        for one in series
    )
    return f'<p class="legend">{items}</p>'


def _nothing(label: str) -> str:
    return f'<p class="empty">{escape(label)}: nothing was recorded.</p>'
