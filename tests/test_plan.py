"""The plan: leaves, keys, points; which key of params.yaml reaches which stage."""

from __future__ import annotations

import collections
import shutil
from pathlib import Path

import pytest

from cluster_sft import plan, strategies
from cluster_sft.errors import UserError
from cluster_sft.params import Launch
from cluster_sft.params_files import load
from cluster_sft.stages import AXES, SCORING, STAGES, get, replace, step_of

ROOT = Path(__file__).parents[1]
READS = {  # what must be made again when another result has changed
    "prepare": [],
    "embed": ["prepare"],
    "cluster": ["embed"],
    "score/ifd": ["prepare"],
    "scorer/less": ["prepare"],
    "features/less": ["prepare", "scorer/less"],
    "score/less": ["prepare", "scorer/less", "features/less"],
    "scorer/s2l": ["prepare"],
    "features/s2l": ["prepare", "scorer/s2l"],
    "score/s2l": ["prepare", "features/s2l"],
    "score/k-center": ["embed"],
    "select": ["prepare", "cluster", "score/ifd", "score/less", "score/s2l", "score/k-center"],
    "train": ["prepare", "select"],
    "validate": ["prepare", "embed", "cluster"],
    "diagnose": ["prepare", "embed", "cluster", "select", "validate"],
    "evaluate": ["prepare", "train"],
    "report": ["evaluate", "diagnose"],
}
STRATEGIES = ["cluster", "ifd", "less", "s2l", "k-center"]
OTHER = {  # a value that differs from params.yaml, for every key that is identity
    "data.source": "other.jsonl",
    "data.format": "alpaca",
    "data.fields": {"output": "answer"},
    "data.holdout": 0.2,
    "data.max_samples": None,
    "data.seed": 1,
    "model.name": "other/model",
    "model.dtype": "fp32",
    "model.template": "plain",
    "model.max_length": 100,
    "cluster.k": 3,
    "cluster.alpha": 2.0,
    "cluster.n_init": 2,
    "cluster.max_iter": 7,
    "cluster.tol": 0.5,
    "cluster.seed": 1,
    "score.ifd.formula": "perplexity_ratio",
    "score.less.warmup_share": 0.5,
    "score.less.warmup_epochs": 2,
    "score.less.learning_rate": 2e-5,
    "score.less.batch_size": 2,
    "score.less.warmup_ratio": 0.2,
    "score.less.lora_rank": 4,
    "score.less.lora_alpha": 8,
    "score.less.lora_dropout": 0.2,
    "score.less.lora_targets": ["q_proj"],
    "score.less.seed": 1,
    "score.less.gradient": "sgd",
    "score.less.projection_dim": 64,
    "score.less.targets": "other.jsonl",
    "score.s2l.epochs": 1,
    "score.s2l.checkpoints": 3,
    "score.s2l.learning_rate": 2e-5,
    "score.s2l.batch_size": 2,
    "score.s2l.warmup_ratio": 0.2,
    "score.s2l.seed": 1,
    "score.s2l.model": "other/proxy",
    "score.s2l.clusters": 7,
    "select.strategies": ["cluster", "uniform"],
    "select.ranking": "core",
    "select.downsample": "strategy",
    "select.ratio": 0.25,
    "select.trim": 0.1,
    "select.seed": 1,
    "train.workers": 2,
    "train.weights": "none",
    "train.batches": "random",
    "train.global_batch_size": 32,
    "train.epochs": 2,
    "train.drop_last": True,
    "train.optimizer": "adafactor",
    "train.learning_rate": 2e-5,
    "train.weight_decay": 0.1,
    "train.scheduler": "cosine",
    "train.warmup_ratio": 0.2,
    "train.loss_reduction": "token",
    "train.precision": "fp32",
    "train.max_grad_norm": None,
    "train.lora_rank": 4,
    "train.lora_alpha": 8,
    "train.lora_dropout": 0.1,
    "train.lora_targets": ["q_proj"],
    "train.cosine_every": 2,
    "train.seed": 1,
    "evaluate.suites": ["heldout"],
    "evaluate.limit": 7,
    "evaluate.max_new_tokens": 7,
    "evaluate.allow_code_execution": False,
    "diagnose.sample": 50,
    "diagnose.permutations": 99,
    "diagnose.gradients": "all",
    "diagnose.map": "tsne",
    "diagnose.examples": 1,
    "diagnose.terms": 1,
    "diagnose.seed": 1,
    "name": "other",
}
EMPTY = [
    f"{stage}/{name}"
    for stage in SCORING
    for name in ["random", "uniform", *STRATEGIES]
    if not step_of(stage, name)
]
FIRST = {  # the first results that a key reaches, where they are not those of its section
    "model.name": ["prepare"],
    "model.dtype": ["embed", "score/ifd", "scorer/less", "scorer/s2l", "evaluate", "validate"],
    "model.template": ["prepare"],
    "model.max_length": ["prepare"],
    "score.ifd.formula": ["score/ifd"],
    "score.less.gradient": ["features/less"],
    "score.less.projection_dim": ["features/less", "score/less"],
    "score.less.targets": ["score/less"],
    "score.s2l.clusters": ["score/s2l"],
    **{f"diagnose.{key}": ["diagnose"] for key in ("map", "examples", "terms")},
    "diagnose.seed": ["validate", "diagnose"],
    "evaluate.suites": ["report"],
    "train.workers": ["cluster"],
    "name": ["prepare", *EMPTY],
}
SECTION = {
    "diagnose": "validate",
    "data": "prepare",
    "score.less": "scorer/less",
    "score.s2l": "scorer/s2l",
}


def reached(key):
    """Return the results that a key must reach, from the table above alone."""
    section = key.rpartition(".")[0]
    found = set(FIRST.get(key) or [SECTION.get(section, section)])
    if key == "select.strategies":
        found |= {e for e in EMPTY if e.endswith("/uniform")}  # it is new
    for stage, reads in READS.items():  # in order, so that once is enough
        if found & set(reads):
            found.add(stage)
    return found


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "data", tmp_path / "data")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "other.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def raw():
    return load([Path("params.yaml")])


@pytest.fixture
def many(raw):
    return replace(raw, "select.strategies", STRATEGIES)


def stamps(raw):
    """Return the stamps of everything that a run makes, by stage; in scoring also by method."""
    found = collections.defaultdict(set)
    for stamp, node in plan.ancestry(plan.target(raw)).items():
        method = f"/{Path(node.leaf).name}" if node.stage in SCORING else ""
        found[node.stage + method].add(stamp)
    return found


def changed(before, after):
    """Return the stages that have to run when `after` is wanted and `before` is there."""
    return {stage for stage in after if after[stage] - before[stage]}


def test_every_identity_key_of_params_yaml_is_flipped_below(raw):
    params = set(keys(raw)) - {f"launch.{k}" for k in Launch.model_fields}
    # A mapping of names of the data's own, empty as shipped.
    assert (params | {"data.fields"}) - {"train.warmup_steps", "study", "configurations"} == set(
        OTHER
    )


def keys(raw, path=""):
    """Yield the dotted names of all scalars and lists of a nested mapping."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from keys(value, f"{path}{key}.")
        else:
            yield path + key


@pytest.mark.parametrize("key", sorted(OTHER))
def test_flipping_a_key_replans_its_stage_and_everything_downstream(many, key):
    before, after = stamps(many), stamps(replace(many, key, OTHER[key]))
    assert changed(before, after) == reached(key) & set(after)


def test_warmup_steps_replan_training(raw):
    over = replace(replace(raw, "train.warmup_ratio", None), "train.warmup_steps", 3)
    assert changed(stamps(raw), stamps(over)) == {"train", "evaluate", "report"}


LAUNCH = {  # of the keys that take no number
    "launch.parallelism": "fsdp",
    "launch.gradient_checkpointing": True,
    "launch.offline": True,
    "launch.trackers": ["mlflow"],
}


@pytest.mark.parametrize("key", sorted(f"launch.{k}" for k in Launch.model_fields))
def test_launch_key_plans_nothing(raw, key):
    value = LAUNCH.get(key, 3)
    assert stamps(replace(raw, key, value)) == stamps(raw)


def test_evaluation_keys_reach_only_the_suites_that_use_them(raw):
    before, after = stamps(raw), stamps(replace(raw, "evaluate.max_new_tokens", 7))
    changed = {Path(s).parts[-2] for s in after["evaluate"] - before["evaluate"]}
    assert changed == {"evalplus-small"}


def test_one_byte_of_the_data_replans_everything(raw):
    over = replace(raw, "data.source", "other.jsonl")
    before = stamps(over)
    Path("other.jsonl").write_text("[]")
    after = stamps(over)
    assert changed(before, after) == set(after) - set(EMPTY)


def test_source_at_another_path_with_the_same_bytes_replans_nothing(raw):
    shutil.copy("other.jsonl", "copy.jsonl")
    one, two = (stamps(replace(raw, "data.source", f)) for f in ("other.jsonl", "copy.jsonl"))
    assert one == two


def test_suites_file_replans_that_suite_alone(raw):
    before = stamps(raw)
    path = Path("data/suites/evalplus-small/suite.yaml")
    path.write_text(path.read_text() + "\n# a remark\n")
    changed = {Path(s).parts[-2] for s in stamps(raw)["evaluate"] - before["evaluate"]}
    assert changed == {"evalplus-small"}


def test_comment_and_order_of_keys_plan_nothing(raw):
    before = stamps(raw)
    text = Path("params.yaml").read_text()
    start, end = text.index("\ncluster:"), text.index("\n# Stage select")
    Path("params.yaml").write_text(text[:start] + text[end:] + text[start:end] + "\n# a remark\n")
    assert stamps(load([Path("params.yaml")])) == before


def test_integer_and_float_of_one_value_make_one_key(raw):
    one, two = (plan.report(replace(raw, "cluster.alpha", a)) for a in (2, 2.0))
    keys = [
        {n.key for n in plan.ancestry(node).values() if n.stage == "cluster"} for node in (one, two)
    ]
    assert keys[0] == keys[1]


def test_workers_set_k_only_while_k_is_auto(raw):
    explicit = replace(raw, "cluster.k", 4)
    keys = {
        name: plan.Planner(r).node("cluster").key
        for name, r in {
            "auto": raw,
            "4": explicit,
            "4, W = 2": replace(explicit, "train.workers", 2),
        }.items()
    }
    assert len(set(keys.values())) == 1


def test_leaf_round_trips_for_every_node(raw):
    raw = replace(raw, "select.strategies", strategies.names())
    for node in plan.ancestry(plan.target(raw)).values():
        again = plan.at(node.leaf, raw)
        assert (again.stage, again.key, again.leaf) == (node.stage, node.key, node.leaf)


def test_leaf_of_a_swept_point_takes_its_axes_from_the_path(raw):
    swept = {**raw, "study": "s", "sweep": {"cluster.alpha": [1.5, 1.0], "train.seed": [0, 7]}}
    for node in plan.ancestry(plan.target(swept)).values():
        if node.stage != "report":
            assert plan.at(node.leaf, raw).key == node.key


@pytest.mark.parametrize(
    ("leaf", "told"),
    [
        ("results/other/prepare", "starts with results/demo/"),
        ("results/demo/nothing", "no such leaf"),
        ("results/demo/cluster/k-auto", "no such leaf|is not of the form"),
        ("results/demo/cluster/k-auto_w-4_alpha-1.50_seed-0", "did you mean .*alpha-1.5_seed-0"),
        ("results/demo/cluster/k-auto_w-4_alpha-0.5_seed-0", "cluster.alpha"),
        ("results/demo/evaluate/base/heldot", "did you mean 'heldout'"),
    ],
)
def test_leaf_that_is_none_is_one_line(raw, leaf, told):
    with pytest.raises(UserError, match=told):
        plan.at(leaf, raw)


def test_sweep_shares_every_common_upstream_result(raw):
    swept = {**raw, "study": "s", "sweep": {"train.seed": [0, 1, 2], "select.ratio": [0.5, 1.0]}}
    count = {stage: len(found) for stage, found in stamps(swept).items()}
    assert count == {
        "prepare": 1,
        "embed": 1,
        "cluster": 1,
        **{f"{stage}/{name}": 1 for stage in SCORING for name in ("cluster", "random")},
        "validate": 1,
        "diagnose": 4,
        "select": 4,
        "train": 12,
        "evaluate": 3 * 13,
        "report": 1,
    }


def test_full_is_one_point_however_clusters_and_ratio_are_swept(raw):
    over = replace(raw, "select.strategies", ["full", "cluster"])
    swept = {**over, "study": "s", "sweep": {"cluster.alpha": [1.0, 2.0], "select.ratio": [0.5, 1]}}
    found = [p.strategy for p in plan.points(swept)]
    assert found == ["base", "full", "cluster", "cluster", "cluster", "cluster"]


def test_random_depends_on_clusters_through_the_budget_but_not_on_the_ranking(raw):
    node = {
        key: plan.Planner(replace(raw, key, OTHER[key])).node("select", "random").key
        for key in ("select.ranking", "cluster.alpha")
    }
    base = plan.Planner(raw).node("select", "random").key
    assert (node["select.ranking"] == base, node["cluster.alpha"] == base) == (True, False)


def test_sweep_over_a_key_that_is_no_axis_lists_the_axes(raw):
    with pytest.raises(UserError, match=r"'train\.optimizer' is no axis; axes: cluster\.alpha, "):
        plan.target({**raw, "study": "s", "sweep": {"train.optimizer": ["adamw"]}})


def test_sweep_without_a_study_asks_for_its_name(raw):
    with pytest.raises(UserError, match="set the key `study`"):
        plan.target({**raw, "sweep": {"train.seed": [0, 1]}})


def test_sweep_value_out_of_range_is_refused_before_any_work(raw):
    with pytest.raises(UserError, match=r"^sweep: cluster\.alpha.*got 0\.5"):
        plan.target({**raw, "study": "s", "sweep": {"cluster.alpha": [1.5, 0.5]}})


def test_model_directory_that_is_not_there_is_refused_before_any_work(raw):
    for key in ("model.name", "score.s2l.model"):
        over = replace(replace(raw, key, "./absent"), "select.strategies", ["s2l"])
        with pytest.raises(UserError, match=rf"^{key} '\./absent': no such directory"):
            plan.target(over)


def test_held_out_rows_as_targets_are_refused_before_any_work_if_there_are_none(raw):
    over = replace(replace(raw, "data.holdout", 0), "select.strategies", ["less"])
    Path("targets.yaml").write_text("split: heldout\n")
    with pytest.raises(UserError, match=r"targets\.yaml: names the held-out rows, and there are"):
        plan.target(replace(over, "score.less.targets", "targets.yaml"))


def test_name_too_long_for_a_folder_is_refused_before_any_work(raw):
    with pytest.raises(UserError, match=r"name: must have at most 100 characters"):
        plan.target({**raw, "name": "n" * 300})


def test_unknown_strategy_is_refused_before_any_work(raw):
    with pytest.raises(UserError, match="did you mean 'uniform'"):
        plan.target(replace(raw, "select.strategies", ["unifrom"]))


@pytest.mark.parametrize("source", ["data", ""])
def test_folder_as_source_is_refused_before_any_work(raw, source):
    with pytest.raises(UserError, match=r"data\.source must name a file"):
        plan.target(replace(raw, "data.source", source))


def test_base_is_no_strategy(raw):
    with pytest.raises(UserError, match="unknown strategy 'base'"):
        plan.target(replace(raw, "select.strategies", ["base"]))


def test_stratified_batch_smaller_than_k_is_refused_before_any_work(raw):
    with pytest.raises(UserError, match=r"at least the number of clusters \(32\).*got 16"):
        plan.target(replace(raw, "cluster.k", 32))


def test_stratified_batches_of_a_strategy_without_clusters_are_refused(raw):
    over = replace(replace(raw, "select.strategies", ["full"]), "train.batches", "stratified")
    with pytest.raises(UserError, match=r"needs clusters, which strategy 'full' ignores"):
        plan.target(over)


def test_auto_equals_the_strategys_own_preset(raw):
    explicit = replace(replace(raw, "train.weights", "cluster"), "train.batches", "stratified")
    keys = [plan.Planner(r).node("train", "cluster").key for r in (raw, explicit)]
    assert keys[0] == keys[1]


def test_model_directory_counts_by_content(raw, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    over = replace(raw, "model.name", "m")
    before = stamps(over)
    (tmp_path / "m" / "config.json").write_text("{ }")
    assert not stamps(over)["embed"] & before["embed"]


def test_packaged_model_counts_by_its_version(raw, monkeypatch):
    from importlib import metadata

    found = []
    for version in ("1.0", "1.1"):
        monkeypatch.setattr(metadata, "version", lambda name, v=version: v)
        found.append(stamps(raw))
    assert changed(*found) == set(found[1]) - set(EMPTY)


def test_axes_are_keys_of_params_yaml(raw):
    assert [key for key in AXES if isinstance(get(raw, key), dict)] == []
    assert {k for s in STAGES.values() for k in s.keys.values()} >= set(AXES)


def test_configurations_put_points_of_several_files_into_one_report():
    for name in ("small", "large"):
        text = Path("params.yaml").read_text().replace("name: demo", f"name: {name}", 1)
        Path(f"{name}.yaml").write_text(text.replace("max_length: 192", f"max_length: {len(name)}"))
    Path("over.yaml").write_text(
        "study: s\nsweep: {train.seed: [0, 1]}\nselect: {ranking: core}\n"
        "configurations: [small.yaml, large.yaml]\n"
    )
    over = load([Path("params.yaml"), Path("over.yaml")])
    nodes = plan.ancestry(plan.target(over)).values()
    assert {n.leaf.split("/")[1] for n in nodes} == {"demo", "small", "large"}
    assert [n.leaf for n in nodes if "/demo/" in n.leaf] == ["results/demo/studies/s"]
    assert {(p["configuration"], p["seed"]) for p in plan.target(over).params.points} == {
        (name, seed) for name in ("small", "large") for seed in (0, 1)
    }
    assert {n.params.ranking for n in nodes if n.stage == "select"} == {"core"}  # the overlay's
    for node in nodes:
        assert plan.at(node.leaf, over).key == node.key


def test_configurations_of_one_name_are_refused(raw):
    over = {**raw, "study": "s", "configurations": [raw, raw]}
    with pytest.raises(UserError, match="two files have the name 'demo'"):
        plan.target(over)


def test_configurations_without_study_ask_for_its_name(raw):
    with pytest.raises(UserError, match="configurations: needs a name"):
        plan.target({**raw, "configurations": [raw]})


@pytest.mark.parametrize(
    ("section", "key", "told"),
    [
        ("data", "format", "data.format: unknown format 'alpacca'; did you mean 'alpaca'"),
        ("model", "template", "model.template: unknown template 'alpacca'; did you mean 'alpaca'"),
    ],
)
def test_unknown_name_is_told_before_a_job_starts(raw, section, key, told):
    with pytest.raises(UserError, match=told):
        plan.target({**raw, section: {**raw[section], key: "alpacca"}})
