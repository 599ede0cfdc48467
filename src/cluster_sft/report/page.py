"""The report page as a Jinja template.

It is Python text because a cache key covers the parsed code that a stage imports: an edit of the
page is then an edit of the report stage, and both engines make the report again.
"""

from __future__ import annotations

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
Scores with 95% intervals (Wilson's for shares, normal for the NLL
{%- if seeds %}, with Student's quantile for what seeds add{% endif %}).
Dashed: the untrained model.
{% endcall %}
{% if differences %}
<h3>Difference to random</h3>
{{ table(differences) }}
<p class="note">
\u00b1 is half of a 95% interval. {{ draw }} \u25b2 better, \u25bc worse, \u2248 within the error.
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

{% if diagnosis %}
<section>
<h2>Diagnostics</h2>
{% if diagnosis.warnings %}
<ul>
{% for warning in diagnosis.warnings %}
<li>{{ warning }}</li>
{% endfor %}
</ul>
{% else %}
<p>No premise of the method fails on these data.</p>
{% endif %}
{% for sentence in diagnosis.sentences %}
<p>{{ sentence }}</p>
{% endfor %}
{{ table(diagnosis.subsets) }}
<p class="note">
Effective rows: (∑w)²/∑w². n·GD: gradient diversity by rows, 1 where all push alike.
Centroid cosine: the lowest over clusters, of the mean of all rows with that of the selected ones,
on the unit embedding e and on the gradient proxy g. Variance ratio: of a weighted stratified step
by a random one, both drawn from the selected rows.
</p>
<h3>Clusters, and what {{ diagnosis.of }} selected of them</h3>
{{ table(diagnosis.clusters) }}
{% if diagnosis.examples %}
<details><summary>Nearest and farthest rows</summary>
{{ words(["cluster", "row", "instruction", "response"], diagnosis.examples) }}
</details>
{% endif %}
{% call figure("diagnose-map") %}
The embedding in the plane. Colour and number: the cluster; solid: selected by {{ diagnosis.of }}.
{% endcall %}
{% call figure("diagnose-validity") %}
Left: the observed difference beside those of permuted labels. Right: the mean cosine of true
gradients over pairs of rows, within and between clusters.
{% endcall %}
{% call figure("diagnose-centroids") %}
Left: how different the clusters are. Right: how well selected rows keep their cluster's direction.
{% endcall %}
{% call figure("diagnose-diversity") %}
Gradient diversity by rows, of clusters and of an epoch's batches of {{ diagnosis.batch }} rows.
{% endcall %}
{% call figure("diagnose-composition") %}
Rows of every cluster in an epoch's batches of {{ diagnosis.batch }} rows, cut either way.
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
{% call figure("worker-cosine") %}
Mean cosine between the gradients of two logical workers in a step, before they are averaged: 1
where all push alike, 0 where they are orthogonal. Workers that have a cluster each can be expected
to agree less than workers with random rows.
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
