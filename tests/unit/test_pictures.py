"""Pictures of layouts and meshes: text tables, terminal colors, SVG drawings and self-contained HTML pages."""

from __future__ import annotations

import itertools
import re
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import dtensor as dt
from dtensor.debug import save_html, visualize_sharding
from dtensor.debug.layout_boxes import MAX_BOXES, boxes_of
from dtensor.debug.svg import svg_of
from dtensor.errors import ArgumentError

S, R, P = dt.Shard, dt.Replicate(), dt.Partial()
MESH = dt.init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
LAYOUTS = [
    ((), (R, R, P)),
    ((5,), (S(0), S(0), S(0))),
    ((7,), (S(0, level=1), R, S(0, level=0))),
    ((5, 4), (S(0), S(1), R)),
    ((6, 7), (S(0, sizes=(5, 1)), S(1), P)),
    ((1, 7), (S(0), S(1), S(1))),
    ((2, 2, 3), (S(0), R, S(2))),
    ((4, 7, 3, 9), (S(0), S(1), S(3))),
    ((3, 2, 1, 5, 2), (S(3), S(0), S(4))),
]


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS)
def test_drawn_boxes_have_each_element_once_and_neighbors_have_other_colors(
    shape: tuple[int, ...], placements: tuple[dt.Placement, ...]
) -> None:
    layout = dt.Layout.of(MESH, placements, shape)
    drawn_ranks: dict[tuple[int, ...], set[int]] = {}
    drawn = [box for panel in boxes_of(layout).panels for line in panel.boxes for box in line]
    for box in drawn:
        spans = re.findall(r"(\d+):(\d+)", box.about)
        for element in itertools.product(*(range(int(begin), int(stop)) for begin, stop in spans)):
            assert element not in drawn_ranks
            drawn_ranks[element] = set(box.ranks)
    layout_ranks: dict[tuple[int, ...], set[int]] = {}
    for rank, coordinate in enumerate(MESH.coordinates):
        start, size = layout.local_offset(coordinate), layout.local_shape(coordinate)
        for element in itertools.product(*(range(a, a + n) for a, n in zip(start, size, strict=True))):
            layout_ranks.setdefault(element, set()).add(rank)
    assert drawn_ranks == layout_ranks
    for panel in boxes_of(layout).panels:
        for (i, j), (k, m) in itertools.combinations(itertools.product(range(len(panel.rows)), range(len(panel.columns))), 2):
            if max(abs(i - k), abs(j - m)) == 1:
                assert panel.boxes[i][j].color != panel.boxes[k][m].color


def box_rects(svg: str) -> list[dict[str, float]]:
    """Return the boxes of an SVG drawing."""
    root = ET.fromstring(svg)
    groups = [g for g in root.iter("{http://www.w3.org/2000/svg}g") if "transform" in g.attrib]
    assert all(float(root.attrib[side]) > 0 for side in ("width", "height"))
    keys = ("x", "y", "width", "height")
    return [{k: float(r.attrib[k]) for k in keys} for g in groups for r in g.iter("{http://www.w3.org/2000/svg}rect")]


def test_svg_boxes_are_drawn_to_scale_without_overlap() -> None:
    found = box_rects(svg_of(boxes_of(dt.Layout.of(MESH, (S(0), S(1), R), (60, 70)))))
    assert len(found) == 6
    widths = [box["width"] for box in found[:3]]
    assert widths[0] == widths[1] > widths[2]  # 24, 24, 22 columns
    for a, b in itertools.combinations(found, 2):
        disjoint = a["x"] + a["width"] <= b["x"] + 0.2 or b["x"] + b["width"] <= a["x"] + 0.2
        assert disjoint or a["y"] + a["height"] <= b["y"] + 0.2 or b["y"] + b["height"] <= a["y"] + 0.2
    partial_svg = svg_of(boxes_of(dt.Layout.of(MESH, (S(0), R, P), (5, 4))))
    assert ("stroke-dasharray" in partial_svg, "P(sum) over tp" in partial_svg) == (True, True)


def test_empty_and_very_large_layouts_have_a_remark_and_no_boxes() -> None:
    nothing = boxes_of(dt.Layout.of(MESH, (S(0), R, R), (0, 4)))
    assert (nothing.panels, nothing.remark) == ((), "no elements")
    large = dt.init_device_mesh("meta", (64, 32))
    many = boxes_of(dt.Layout.of(large, (S(0), S(1)), (1024, 320)))
    assert (many.panels, many.remark) == ((), "2,048 shards of up to 640 B")
    assert MAX_BOXES < 2048
    assert boxes_of(large).remark == "2,048 ranks"
    assert box_rects(svg_of(many)) == []


def test_boxes_of_a_mesh_show_its_ranks_and_of_a_submesh_those_of_all_copies() -> None:
    (panel, _) = boxes_of(MESH).panels
    assert [[box.ranks for box in line] for line in panel.boxes] == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)]]
    (panel,) = boxes_of(MESH["tp"]).panels
    assert [box.text for box in panel.boxes[0]] == ["0, 2, 4, 6, 8, 10", "1, 3, 5, 7, 9, 11"]


def test_visualize_sharding_prints_colors_to_a_terminal_and_text_to_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = dt.zeros(5, 4, device_mesh=MESH, placements=[S(0), R, R])
    visualize_sharding(x, "x", use_rich=True)
    output = capsys.readouterr().out
    assert output.startswith("x\n")
    assert "48;2;166;206;227" in output
    plain = re.sub("\x1b\\[[0-9;]*m", "", output)
    assert "0:3" in plain
    assert "0-5" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)
    visualize_sharding(MESH["dp", "tp"])  # in 8 colors: 46 is cyan, 43 yellow
    output = capsys.readouterr().out
    assert re.search("\x1b\\[30;46m +0, 6 +\x1b\\[0m\x1b\\[30;43m +1, 7 ", output), output
    monkeypatch.setenv("NO_COLOR", "1")
    visualize_sharding(x)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    for off in (False, None):
        visualize_sharding(x, use_rich=off)
        assert capsys.readouterr().out == "     0:4\n0:3  0, 1, 2, 3, 4, 5\n3:5  6, 7, 8, 9, 10, 11\n"
    visualize_sharding(MESH["pp", "tp"])
    assert capsys.readouterr().out.splitlines()[1] == "pp 0  0, 2, 4   1, 3, 5"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="rich"):
        visualize_sharding(x, use_rich=True)
    with pytest.raises(ArgumentError, match="distribute_tensor"):
        visualize_sharding(torch.zeros(3))


def test_visualize_sharding_displays_svg_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displayed: list[str] = []
    display = types.SimpleNamespace(display=lambda data, raw: displayed.append(data["text/html"]))
    shell = types.SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell, display=display))
    visualize_sharding(dt.Layout.of(MESH, (S(0), R, R), (5, 4)), "here")
    assert "<svg" in displayed[0]
    assert capsys.readouterr().out == ""
    del shell.kernel  # IPython in a terminal
    visualize_sharding(dt.Layout.of(MESH, (S(0), R, R), (5, 4)))
    assert (len(displayed), "0:3" in capsys.readouterr().out) == (1, True)


def test_html_pages_are_self_contained_and_show_source_lines_with_bytes(tmp_path: Path) -> None:
    x = dt.ones(4, 6, device_mesh=MESH["tp"], placements=[S(0)])

    def step() -> torch.Tensor:
        return x @ x.t()  # <&>

    explained = dt.explain(step)
    x = dt.ones(4, 6, device_mesh=MESH["tp"], placements=[S(0)])  # a new tensor without cached copies
    planned = dt.plan(step)
    assert sum(len(call.moves) for call in planned.calls) >= 1
    for name, value in {"tensor": x, "layout": x.layout, "mesh": MESH, "explained": explained, "planned": planned}.items():
        html = value._repr_html_()
        page = save_html(value, tmp_path / f"{name}.html", "a <title>").read_text()
        assert html in page
        assert "<h1>a &lt;title&gt;</h1>" in page
        assert not re.search(r"(src|href)=|url\(|@import|<script", page)
        if name in ("explained", "planned"):
            assert "# &lt;&amp;&gt;" in html
            assert "return x @ x.t()  # &lt;&amp;&gt;" in re.sub("</?span[^>]*>", "", html)
            assert f"</span>{explained.bytes} B</td>" in html
            assert "<details><summary>" in html
            assert "<details open" not in html
            assert f"<h3>{__file__}</h3>" in html
    assert "values" in x._repr_html_()
    assert "Nothing is redistributed." in dt.explain(lambda: None)._repr_html_()
    with pytest.raises(ArgumentError, match="a int has no picture"):
        save_html(3, tmp_path / "three.html")


def test_auto_shard_result_has_an_html_page() -> None:
    found = dt.auto_shard(torch.nn.Linear(64, 64), dt.init_device_mesh("meta", (4,)), example=(torch.empty(1024, 64),))
    assert "placements of 3 tensors" in found._repr_html_()
    assert "<td>batch 0</td>" in found._repr_html_()


def test_blocks_picture_of_the_docs_equals_the_drawing() -> None:
    grid = dt.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    picture = Path(__file__).parents[2] / "docs" / "pictures" / "blocks.svg"
    assert picture.read_text() == svg_of(boxes_of(dt.Layout.of(grid, (S(0), S(1)), (5, 7)))) + "\n"
