"""The first lines of a report: what was compared under which budget, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_sft.report.comparison import Difference, against
from cluster_sft.report.labels import axis_name, show, show_count
from cluster_sft.report.points import (
    CONFIGURATION,
    METRICS,
    Metric,
    Value,
    configurations,
    setting,
    varying,
)
from cluster_sft.report.results import Results
from cluster_sft.report.tables import metrics_of

SUBJECT, CONTROL = "cluster", "random"


@dataclass(frozen=True)
class Verdict:
    """What a metric says about the subject against the control."""

    title: str
    phrase: str  # the title inside a sentence
    text: str
    outcome: str  # better, worse, within error, error unknown, mixed


def compared(results: Results) -> str:
    """Return one or two sentences: the strategies, the budget, the settings that vary."""
    trained = [g for g in results.groups if g.strategy != "base"]
    budgeted = [g for g in trained if g.strategy != "full"]
    names = list(dict.fromkeys(g.strategy for g in budgeted))
    counts = sorted({round(r) for g in budgeted if (r := g.costs["rows"]) is not None})
    shares = sorted({s for g in budgeted if (s := g.costs["data_share"]) is not None})
    ratios = sorted({g.ratio for g in budgeted if g.ratio is not None})
    if not counts:
        return "No strategy was trained."
    rows = f"{show_count(counts[0])} rows"
    share = f"{shares[0]:.1%} of the training set" if shares else ""
    if len(counts) > 1:
        rows = f"{show_count(counts[0])} to {show_count(counts[-1])} rows"
        share = f"{shares[0]:.1%} to {shares[-1]:.1%} of the training set" if shares else ""
    ratio = (
        f"r = {ratios[0]}"
        if len(ratios) == 1
        else f"r from {ratios[0]} to {ratios[-1]}"
        if ratios
        else ""
    )
    detail = ", ".join(part for part in (share, ratio) if part)
    each = "each trained on" if len(names) > 1 else "trained on"
    parts = [f"{_join(names)}, {each} {rows} ({detail})"]
    if any(g.strategy == "full" for g in trained):
        parts.append("all rows (full)")
    if len(trained) < len(results.groups):
        parts.append("the untrained model (base)")
    text = parts[0] + (f", next to {_join(parts[1:])}" if parts[1:] else "") + "."
    seeds = max(len(g.points) for g in results.groups)
    if seeds > 1:
        text += f" Means over up to {seeds} seeds."
    if swept := [n for n in varying(results.groups) if n != "ratio"]:
        text += f" Swept: {'; '.join(_swept(results, name) for name in swept)}."
    return text[0].upper() + text[1:]


def _swept(results: Results, name: str) -> str:
    values = dict.fromkeys(str(v) for g in results.groups if (v := setting(g, name)) is not None)
    return f"{axis_name(name)} {', '.join(values)}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def verdicts(results: Results) -> list[Verdict]:
    """Return what each metric says about cluster against random; empty where one is missing."""
    found = against(results, SUBJECT, CONTROL)
    out = []
    for metric in metrics_of(results):
        mine = [d for d in found if d.metric == metric]
        if len(mine) == 1:
            out.append(Verdict(metric.title, metric.phrase, _single(mine[0]), mine[0].outcome))
        elif mine:
            out.append(_many(metric, mine))
    return out


def _single(difference: Difference) -> str:
    metric, outcome = difference.metric, difference.outcome
    unit = "points" if metric.is_share else metric.unit
    size = show(metric, abs(difference.value))
    if difference.margin is None:
        return f"{SUBJECT.capitalize()} and {CONTROL} differ by {size} {unit}, error unknown."
    span = f"{size} \u00b1 {show(metric, difference.margin)} {unit}"
    if outcome == "within error":
        return f"No difference between {SUBJECT} and {CONTROL} beyond the error ({span})."
    winner, loser = (SUBJECT, CONTROL) if outcome == "better" else (CONTROL, SUBJECT)
    return f"{winner.capitalize()} is better than {loser} by {span}."


def _many(metric: Metric, differences: Sequence[Difference]) -> Verdict:
    counts = Counter(d.outcome for d in differences)
    text = (
        f"Of {len(differences)} comparisons {SUBJECT} is better than {CONTROL} in "
        f"{counts['better']}, worse in {counts['worse']}, within the error in "
        f"{counts['within error'] + counts['error unknown']}."
    )
    outcome = "mixed"
    if not counts["better"] and not counts["worse"]:
        outcome = "within error"
    for side, opposite in (("better", "worse"), ("worse", "better")):
        if 2 * counts[side] > len(differences) and not counts[opposite]:
            outcome = side
    return Verdict(metric.title, metric.phrase, text, outcome)


def notes(results: Results) -> list[str]:
    """Return what must be said plainly: where random wins, and whether training helped at all."""
    out = []
    found = verdicts(results)
    if lost := [v.phrase for v in found if v.outcome == "worse"]:
        out.append(
            f"Random selection of the same size is the better choice here by {_join(lost)}: on "
            "this evidence clustering did not pay for this model and these data."
        )
    if found and all(v.outcome == "within error" for v in found):
        out.append(
            "Nothing here tells cluster and random apart: every difference is within its error. "
            "More evaluation items or more seeds would be needed."
        )
    proven = any(v.outcome in ("better", "worse") for v in found)
    if proven and any(len(g.points) == 1 for g in results.groups if g.strategy == SUBJECT):
        out.append(
            "This rests on one training seed: the margins cover the evaluated items, not the luck "
            "of a training run."
        )
    return out + _training_notes(results)


def _training_notes(results: Results) -> list[str]:
    """Say how training moved the held-out loss of the untrained model."""
    names = configurations(results.groups)
    return [note for name in names for note in _training_note(results, name)]


def _training_note(results: Results, configuration: Value | None) -> list[str]:
    """Say it of one configuration, by name where there are several."""
    metric = METRICS[0]
    scored = [
        g
        for g in results.groups
        if setting(g, CONFIGURATION) == configuration and metric.name in g.estimates
    ]
    base = next((g.estimates[metric.name] for g in scored if g.strategy == "base"), None)
    trained = [g for g in scored if g.strategy != "base"]
    if base is None or not trained:
        return []
    place = f" of {configuration}" if configuration is not None else ""
    failed = [g for g in trained if g.estimates[metric.name].value >= base.value]
    if failed:
        names = _join(list(dict.fromkeys(g.strategy for g in failed)))
        return [
            f"Training did not lower the held-out NLL of the untrained model{place} "
            f"({show(metric, base.value)}) for {names}."
        ]
    values = [g.estimates[metric.name].value for g in trained]
    named = [f"{show(metric, v)} ({g.strategy})" for g, v in zip(trained, values, strict=True)]
    ends = f"between {show(metric, min(values))} and {show(metric, max(values))}"
    return [
        f"Training lowers the held-out NLL{place} from {show(metric, base.value)} (base) to "
        f"{_join(named) if len(named) <= 3 else ends} nats per token."
    ]
