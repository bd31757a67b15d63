"""HTML templates (jinja2) of pages and of what notebooks show: a program's lines with the bytes that each receives."""

from __future__ import annotations

STYLE = """<style>
.dtensor { --dim: #6b6b78; --rule: #8884; --bar: #4a90d9; line-height: 1.4; }
.dtensor h3 { margin: 1.2em 0 0.3em; font-weight: 600; font-size: 1em; overflow-wrap: anywhere; }
.dtensor table { border-collapse: collapse; }
.dtensor table.listing { width: 100%; }
.dtensor td, .dtensor th { padding: 0 0.8em 0 0; text-align: left !important; vertical-align: top; border: 0; background: none; }
.dtensor .modules td, .dtensor .modules th { padding: 0.1em 1.6em 0.1em 0; border-bottom: 1px solid var(--rule); }
.dtensor .modules :not(:first-child) { text-align: right !important; }
.dtensor pre, .dtensor .code { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; margin: 0; }
.dtensor .code { white-space: pre-wrap; }
.dtensor .number, .dtensor .gap { color: var(--dim); text-align: right !important; width: 3em; }
.dtensor .bytes { white-space: nowrap; width: 12em; }
@media (max-width: 45em) { .dtensor .bytes { width: auto; } .dtensor .bar { display: none; } }
.dtensor .bar { display: inline-block; height: 0.7em; background: var(--bar); margin-right: 0.5em; border-radius: 2px; }
.dtensor .moving .code { font-weight: 700; }
.dtensor summary { cursor: pointer; color: var(--dim); }
.dtensor .detail pre { border-left: 2px solid var(--rule); padding-left: 0.8em; white-space: pre-wrap; }
{{ colors }}
</style>"""

LISTING = """<div class="dtensor">{{ style }}<p>{{ head }}</p>
{%- if placements %}
<details><summary>placements of {{ placements|length }} tensors</summary><table>
{%- for name, text in placements %}<tr><td>{{ name }}</td><td>{{ text }}</td></tr>{% endfor -%}
</table></details>
{%- endif %}
{%- for file in files %}
<h3>{{ file.name or "outside of the program" }}</h3><table class="listing">
{%- for row in file.rows %}
{%- if row.gap %}<tr><td class="gap">⋮</td></tr>{% endif %}
<tr class="{{ 'moving' if row.details else 'still' }}"><td class="number">{{ row.number or "" }}</td><td class="bytes">
{%- if row.details %}<span class="bar" style="width:{{ row.width }}em"></span>{{ row.size }}{% endif -%}
</td><td class="code">{{ row.code }}</td></tr>
{%- if row.details %}
<tr class="detail"><td colspan="2"></td><td>
<details><summary>{{ row.summary }}</summary><pre>{{ row.details }}</pre></details></td></tr>
{%- endif %}
{%- endfor %}
</table>
{%- else %}<p>Nothing is redistributed.</p>
{%- endfor %}
{%- if modules %}
<details><summary>by module</summary><table class="modules">
<tr>{% for name in modules[0] %}<th>{{ name }}</th>{% endfor %}</tr>
{%- for row in modules[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor -%}
</table></details>
{%- endif %}
</div>"""

PICTURE = """<div class="dtensor">{{ picture }}<details><summary>values</summary><pre>{{ values }}</pre></details></div>"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{ title }}</title><style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
@media (prefers-color-scheme: dark) {
body .dtensor { --dim: #a0a0ae; }
{{ dark_colors }}
}
</style></head><body>
<h1>{{ title }}</h1>
{{ body }}
</body></html>
"""
