"""The report page's style sheet; Python text for the reason that `page` states."""

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
