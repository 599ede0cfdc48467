"""The report page as a Jinja template and its style sheet.

Both are Python text because a cache key covers the parsed code that a stage imports: an edit of the
page is then an edit of the report stage, and both engines make the report again.
"""

from __future__ import annotations

STYLE = """
*, *::before, *::after { box-sizing: border-box; }
:root { color-scheme: light dark; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--surface); color: var(--ink);
  font: 16px/1.55 Inter, system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif;
}
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 1rem; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; margin: 3.25rem 0 0.75rem; }
h3 { font-size: 1rem; margin: 2rem 0 0.5rem; }
p, ul { margin: 0 0 0.9rem; max-width: 46rem; }
ul { padding-left: 1.1rem; }
li { margin-bottom: 0.4rem; }
code { font: 0.85em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.kind { color: var(--muted); font-size: 0.9rem; margin: 0 0 0.35rem; }
.lead { font-size: 1.15rem; line-height: 1.5; }
.verdicts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr));
  gap: 0.75rem; max-width: none; margin: 1.5rem 0; padding: 0; list-style: none;
}
.verdicts li {
  border: 1px solid var(--grid); border-left: 4px solid var(--muted); border-radius: 6px;
  margin: 0; padding: 0.7rem 0.9rem;
}
.verdicts .better { border-left-color: var(--better); }
.verdicts .worse { border-left-color: var(--worse); }
.verdicts b { display: block; font-size: 0.85rem; color: var(--muted); font-weight: 600; }
.scroll { overflow-x: auto; margin: 0.5rem 0 0.75rem; }
table {
  border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums;
}
th, td { padding: 0.45rem 0.6rem; text-align: right; }
th {
  font-weight: 600; line-height: 1.3; color: var(--muted); vertical-align: bottom;
  border-bottom: 1px solid var(--muted);
}
td { border-bottom: 1px solid var(--grid); white-space: nowrap; }
th.word, td.word { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
td.best { font-weight: 700; }
td.better { color: var(--better); }
td.worse { color: var(--worse); }
td.wrap { white-space: normal; overflow-wrap: anywhere; }
.dot {
  display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin-right: 0.5em;
  print-color-adjust: exact; -webkit-print-color-adjust: exact;
}
figure { margin: 1rem 0 1.5rem; break-inside: avoid; }
figure svg { display: block; width: 100%; min-width: 38rem; height: auto; }
figcaption, .note { color: var(--muted); font-size: 0.875rem; max-width: 46rem; }
figcaption { margin-top: 0.5rem; }
details { margin: 0.75rem 0; }
summary { cursor: pointer; color: var(--muted); }
@media print {
  :root { color-scheme: light; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  h2, h3 { margin-top: 1.6rem; break-after: avoid; }
  tr, li { break-inside: avoid; }
  .scroll { overflow: visible; }
  figure svg { min-width: 0; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
@page { margin: 16mm; }
"""

PAGE = """
{%- macro head(text, word) -%}
<th{% if word %} class="word"{% endif %} scope="col">{{ text }}</th>
{%- endmacro -%}

{%- macro table(t) -%}
<div class="scroll"><table>
<thead><tr>{% for text in t.heads %}{{ head(text, loop.index0 < t.words) }}{% endfor %}</tr></thead>
<tbody>
{% for row in t.rows %}
<tr>
{% for cell in row %}
{% set word = "word" if loop.index0 < t.words %}
<td class="{{ [word, "best" if cell.best, cell.style]|select|join(" ") }}">
{%- if loop.first and cell.style in colours -%}
<span class="dot" style="background: {{ colours[cell.style] }}"></span>
{%- endif -%}
{{ cell.text }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{%- endmacro -%}

{%- macro words(heads, rows) -%}
<div class="scroll"><table>
<thead><tr>{% for text in heads %}{{ head(text, true) }}{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for text in row %}<td class="word wrap">{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{%- endmacro -%}

{%- macro blocks(some) -%}
{% for block in some %}
<h3>{{ block.title }}</h3>
{{ table(block.table) }}
{% if block.note %}<p class="note">{{ block.note }}</p>{% endif %}
{% endfor %}
{%- endmacro -%}

{%- macro figure(name) -%}
{% if name in figures %}
<figure>
<div class="scroll">{{ figures[name] }}</div>
<figcaption>{{ caller() }}</figcaption>
</figure>
{% endif %}
{%- endmacro -%}

<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} \u00b7 CluSTER {{ kind }}</title>
<style>
{{ theme }}{{ style }}</style>
</head>
<body>
<main>
<header>
<p class="kind">CluSTER {{ kind }}</p>
<h1>{{ title }}</h1>
<p class="lead">{{ compared }}</p>
</header>

{% if verdicts %}
<ul class="verdicts">
{% for v in verdicts %}
<li class="{{ v.outcome }}"><b>{{ v.title }}</b>{{ v.text }}</li>
{% endfor %}
</ul>
{% endif %}
{% for note in notes %}
<p>{{ note }}</p>
{% endfor %}

{% if studies %}
<section>
<h2>What varies</h2>
{% for name in studies %}
{% call figure(name) %}
{% if name.startswith("bars-") %}
A bar for each value, with
{{ "its standard deviation over seeds" if seeds else "one standard error" }}.
{% else %}
{% if thin %}Bold: the mean over the settings of the other axes; thin: each of them. {% endif %}
{% if not thin %}Bars: {{ "the standard deviation over seeds" if seeds else "one standard error" }}.
{% endif %}
{% if levels %}Dashed: strategies that the axis does not touch.{% endif %}
{% endif %}
{% endcall %}
{% endfor %}
</section>
{% endif %}

{% if study and "study" in made %}
<section>
<h2>Benchmarks</h2>
{{ blocks(made.study) }}
</section>
{% endif %}

<section>
<h2>Results</h2>
{{ table(results) }}
<p class="note">
Scores are means \u00b1 one standard error over the evaluated items
{%- if seeds %} and over seeds{% endif %}.
A value is bold only where it beats every other row of the same budget by more than the
95% margin of their difference; base and full are outside the budget and not ranked.
{% if items %}Items: {{ items }}.{% endif %}
</p>
{% call figure("scores") %}
Scores with 95% intervals (Wilson's for shares, normal for the NLL). Dashed: the untrained model.
{% endcall %}
{% if differences %}
<h3>Difference to random</h3>
{{ table(differences) }}
<p class="note">
\u00b1 is half of a 95% interval. \u25b2 better, \u25bc worse, \u2248 within the error.
{% if paired %}
{{ paired }}: compared item by item, which is sharper than the two separate errors suggest.
{% endif %}
</p>
{% endif %}
{% if seeds %}
<h3>Over seeds</h3>
{{ table(seeds) }}
<p class="note">Mean \u00b1 standard deviation over seeds.</p>
<details><summary>Single runs</summary>{{ table(runs) }}</details>
{% endif %}
{% if skipped %}
<h3>Not run</h3>
<ul>
{% for suite, reason, who in skipped %}
<li><b>{{ suite }}</b>{% if who != "all" %} ({{ who }}){% endif %}: {{ reason }}</li>
{% endfor %}
</ul>
{% endif %}
</section>

{% if warnings %}
<section>
<h2>Warnings</h2>
<ul>
{% for warning in warnings %}
<li>{{ warning }}</li>
{% endfor %}
</ul>
</section>
{% endif %}

{% if "rows" in figures or "clusters" in figures %}
<section>
<h2>Data and clusters</h2>
{% call figure("rows") %}
From the source to each training subset. Red bars leave the training set, by reason.
{% endcall %}
{% call figure("clusters") %}
Light: all rows of a cluster; solid: those that strategy cluster selected. Dashed: the most rows
that a cluster may hold. Below: the factor on the loss of a selected row; clusters that were cut
the most weigh the most, and the mean over the subset is 1.
{% if hidden > 0 %}{{ hidden }} more clusterings are not drawn.{% endif %}
{% endcall %}
</section>
{% endif %}

{% if "loss" in figures %}
<section>
<h2>Training</h2>
{% call figure("loss") %}
Training loss as optimised, that is, weighted where a strategy weighs its rows: it shows whether a
run is healthy, not which strategy is better.
{% if seeds %}Curves are means over seeds; a shade, where drawn, is their range.{% endif %}
{% endcall %}
</section>
{% endif %}

{% if "costs" in made %}
<section>
<h2>Costs</h2>
{% call figure("costs") %}
Time of selection, by step, and of training, in grey. What all methods share before selection is
left out, and so is evaluation.
{% endcall %}
{{ blocks(made.costs) }}
{{ blocks(made.get("complexity", [])) }}
</section>
{% endif %}

<section>
<h2>How this was made</h2>
{{ blocks(made.get("datasets", [])) }}
{% if parameters %}
<details><summary>Parameters</summary>
{{ words(["stage", "parameter", "value"], parameters) }}
</details>
{% endif %}
{% if sources %}
<details><summary>Leaves and their keys</summary>
{{ words(["leaf", "key"], sources) }}
</details>
{% endif %}
<p class="note">
The numbers behind this page: <code>summary.csv</code>, <code>means.csv</code>,
<code>metrics.json</code>, <code>plots/</code>; its tables as Markdown, CSV and LaTeX:
{% for name in made %}<code>{{ name }}.*</code>{{ ", " if not loop.last }}{% endfor %}; its figures:
<code>figures/</code>.
</p>
</section>
</main>
</body>
</html>
"""
