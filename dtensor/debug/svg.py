"""SVG drawings of boxes: sizes to scale, neighbors in different colors, self-contained."""

from __future__ import annotations

from html import escape

from .layout_boxes import COLORS, Box, Boxes, Panel, scale_lengths

_PANEL_WIDTH, _PANEL_HEIGHT = 420.0, 240.0  # pixels, unless labels need more
_LETTER_WIDTH, _LINE_HEIGHT, _PANEL_GAP = 7.2, 22.0, 18.0
_MAX_LABEL = 22  # letters in a box; the tooltip has the full text


def svg_of(boxes: Boxes) -> str:
    """Return an ``<svg>`` element: text in the color of the page around it, light boxes with dark text."""
    drawn, x, y, low, width = [], 0.0, 0.0, 0.0, 0.0
    row = _LINE_HEIGHT
    for panel in boxes.panels:
        body, wide, high = _panel_elements(panel)
        if x and x + wide > 2.2 * _PANEL_WIDTH:
            x, y = 0.0, low + _PANEL_GAP
        drawn.append(f'<g transform="translate({x:.0f} {y + row:.0f})">{body}</g>')
        x, low, width = x + wide + _PANEL_GAP, max(low, y + high), max(width, x + wide)
    panels = "".join(drawn)
    if boxes.partial:
        panels = panels.replace('stroke="#444"', 'stroke="#444" stroke-width="1.5" stroke-dasharray="5 3"')
    foot = low + row + (_LINE_HEIGHT if boxes.remark else 0.0)
    width = max(width, _LETTER_WIDTH * max(len(boxes.title), len(boxes.remark)) + 4)
    texts = [_text_element(2, 14, boxes.title, "start")] + (
        [_text_element(2, foot - 6, boxes.remark, "start")] if boxes.remark else []
    )
    style = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px;max-width:100%;height:auto"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{foot + 4:.0f}" '
        f'viewBox="0 0 {width:.0f} {foot + 4:.0f}" style="{style}" role="img" aria-label="{escape(boxes.title)}">'
        f"{''.join(texts)}{panels}</svg>"
    )


def _panel_elements(panel: Panel) -> tuple[str, float, float]:
    """Return the SVG elements of a panel with its labels, and its width and height in pixels."""
    left = 4 + _LETTER_WIDTH * max(len(interval.text) for interval in panel.rows) + (4 if panel.rows[0].text else 0)
    top = (_LINE_HEIGHT if panel.title else 0.0) + (_LINE_HEIGHT if panel.columns[0].text else 0.0)
    least = [
        max(_LETTER_WIDTH * max(len(column.text), *(len(_shorten_label(line[j].text)) for line in panel.boxes)) + 12, 34.0)
        for j, column in enumerate(panel.columns)
    ]
    widths, heights = (
        scale_lengths(panel.columns, _PANEL_WIDTH, least),
        scale_lengths(panel.rows, _PANEL_HEIGHT, [26.0] * len(panel.rows)),
    )
    if len(panel.rows) == 1:
        heights = [40.0]
    parts = [_text_element(left, 14, panel.title, "start")] if panel.title else []
    x = left
    for column, wide in zip(panel.columns, widths, strict=True):
        parts += [_text_element(x + wide / 2, top - 6, column.text)] if column.text else []
        x += wide
    y = top
    for row, line, high in zip(panel.rows, panel.boxes, heights, strict=True):
        parts += [_text_element(left - 6, y + high / 2 + 4, row.text, "end")] if row.text else []
        x = left
        for box, wide in zip(line, widths, strict=True):
            parts.append(_box_element(box, x, y, wide, high))
            x += wide
        y += high
    return "".join(parts), x + 2, y + 2


def _box_element(box: Box, x: float, y: float, wide: float, high: float) -> str:
    """Return the SVG element of one box: a colored rectangle with its ranks, and a tooltip."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return (
        f"<g><title>{escape(box.about)} on ranks {box.text}</title>"
        f'<rect {place} fill="{COLORS[box.color]}" stroke="#444"/>'
        f"{_text_element(x + wide / 2, y + high / 2 + 4, _shorten_label(box.text), fill='#111')}</g>"
    )


def _shorten_label(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"


def _text_element(x: float, y: float, text: str, anchor: str = "middle", fill: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
