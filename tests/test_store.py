"""The store: reuse, restore, never overwrite, notice damage, survive a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_sft import store
from cluster_sft.errors import UserError
from cluster_sft.nodes import Node
from cluster_sft.params import Section


def node(key="a" * 64, leaf="results/n/cluster/c", inputs=None):
    return Node("cluster", leaf, key, Section(), inputs or {})


def writer(text):
    def compute(made, out, scratch):
        (out / "payload").write_text(text)

    return compute


def forbidden(made, out, scratch):
    raise AssertionError("computed again")


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    return tmp_path


def read(leaf="results/n/cluster/c"):
    return Path(leaf, "payload").read_text()


def test_make_twice_reuses_and_renews_the_stamp():
    assert store.make(node(), writer("1")) == "computed"
    stamp = Path(node().stamp)
    stamp.unlink()
    assert store.make(node(), forbidden) == "reused"
    assert stamp.is_file()


def test_make_another_key_keeps_the_old_result_and_restores_it():
    old, new = node(), node("b" * 64)
    store.make(old, writer("old"))
    store.make(new, writer("new"))
    assert (read(), Path(old.stamp).exists()) == ("new", False)
    assert store.make(old, forbidden) == "restored"
    assert (read(), Path(new.stamp).exists()) == ("old", False)
    assert store.make(new, forbidden) == "restored"


def test_leaf_that_another_tool_removed_is_restored_without_computing():
    import shutil

    store.make(node(), writer("1"))
    shutil.rmtree("results/n/cluster")  # as `dvc checkout` does with what its lock does not name
    assert store.make(node(), forbidden) == "restored"
    assert read() == "1"


def test_kept_result_takes_no_space_of_its_own():
    store.make(node(), writer("1"))
    assert Path("results/n/cluster/c/payload").samefile(Path("work/kept") / ("a" * 64) / "payload")


def test_note_that_a_user_put_into_a_leaf_is_kept_when_its_place_is_taken():
    store.make(node(), writer("1"))
    Path("results/n/cluster/c/notes.txt").write_text("mine")
    store.make(node("b" * 64), writer("2"))
    assert [p.read_text() for p in Path("work/kept").rglob("notes.txt")] == ["mine"]


def test_result_altered_through_its_leaf_is_not_restored_from_the_shelf():
    store.make(node(), writer("12345"))
    Path("results/n/cluster/c/payload").write_text("12346")  # the same file as on the shelf
    assert store.make(node(), writer("12345")) == "computed"
    assert read() == "12345"


def test_fresh_computes_again_and_its_result_is_the_one_restored():
    store.make(node(), writer("1"))
    assert store.make(node(), writer("2"), fresh=True) == "computed"
    store.make(node("b" * 64), writer("other"))
    assert store.make(node(), forbidden) == "restored"
    assert read() == "2"
    assert sorted(p.read_text() for p in Path("work/kept").rglob("payload")) == ["1", "2", "other"]


def test_make_at_another_leaf_with_equal_key_links_instead_of_computing():
    store.make(node(), writer("1"))
    assert store.make(node(leaf="results/n/cluster/d"), forbidden) == "restored"
    assert read("results/n/cluster/d") == read() == "1"


def test_failed_compute_leaves_the_old_result_and_nothing_half_written():
    store.make(node(), writer("old"))

    def failing(made, out, scratch):
        (out / "payload").write_text("half")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        store.make(node("b" * 64), failing)
    assert read() == "old"
    assert sorted(p.name for p in Path("results/n").iterdir()) == [".partial", "cluster"]
    assert list(Path("results/n/.partial").iterdir()) == []


def test_killed_compute_keeps_scratch_and_the_next_run_finds_it():
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom cluster_sft import store\n"
        "from cluster_sft.nodes import Node\nfrom cluster_sft.params import Section\n"
        "def compute(made, out, scratch):\n"
        "    (scratch / 'checkpoint').write_text('7')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.make(Node('cluster', 'results/n/cluster/c', 'a' * 64, Section()), compute)\n"
    )
    source = str(Path(store.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source})
    found = {}

    def resumed(made, out, scratch):
        found["step"] = (scratch / "checkpoint").read_text()
        (out / "payload").write_text("done")

    assert store.make(node(), resumed) == "computed"
    assert found == {"step": "7"} and read() == "done"
    assert not (Path("work") / ("a" * 64)).exists()


@pytest.mark.parametrize(
    ("harm", "outcome"),
    [("truncate", "computed"), ("alter", "computed"), ("remove", "restored")],
)
def test_damaged_upstream_is_refused_and_made_anew_when_asked(harm, outcome):
    store.make(node(), writer("12345"))
    path = Path("results/n/cluster/c/payload")
    {
        "truncate": lambda: path.write_text("123"),
        "alter": lambda: path.write_text("12346"),
        "remove": path.unlink,
    }[harm]()
    below = replace(node("c" * 64, "results/n/select/s"), inputs={"clusters": node()})
    with pytest.raises(UserError, match=r"payload (was truncated or altered|is missing)"):
        store.make(below, forbidden)
    assert store.make(node(), writer("12345")) == outcome
    assert store.make(below, writer("x")) == "computed"


def test_upstream_of_another_key_is_refused_with_the_command_to_run():
    store.make(node(), writer("1"))
    below = replace(node("c" * 64, "results/n/select/s"), inputs={"clusters": node("d" * 64)})
    with pytest.raises(UserError, match=r"cluster-sft run results/n/cluster/c"):
        store.make(below, forbidden)


def test_result_made_of_other_inputs_is_not_reused():
    store.make(node(), writer("1"))
    below = replace(node("c" * 64, "results/n/select/s"), inputs={"clusters": node()})
    store.make(below, writer("of 1"))
    store.make(node(), writer("2"), fresh=True)
    assert store.make(below, writer("of 2")) == "computed"


def test_users_own_files_in_a_leafs_place_are_kept():
    Path("results/n/cluster/c").mkdir(parents=True)
    Path("results/n/cluster/c/notes.txt").write_text("mine")
    store.make(node(), writer("1"))
    assert [p.read_text() for p in Path("work/kept").rglob("notes.txt")] == ["mine"]


def test_stage_of_its_own_never_replaces_what_is_in_out():
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="nothing is ever overwritten"):
        store.make(node(leaf="out"), forbidden, workspace=False)
    assert Path("out/notes.txt").read_text() == "mine"


def test_stage_of_its_own_leaves_nothing_beside_out():
    assert store.make(node(leaf="sub/out"), writer("1"), workspace=False) == "computed"
    assert store.make(node(leaf="sub/out"), forbidden, workspace=False) == "reused"
    assert os.listdir("sub") == ["out"]


def test_stage_of_its_own_that_fails_leaves_no_scratch_and_no_new_folder():
    def failing(made, out, scratch):
        (scratch / "batches").mkdir()
        (scratch / "batches/1").write_text("half")
        raise UserError("row 3: bad")

    with pytest.raises(UserError, match="row 3"):
        store.make(node(leaf="new/sub/out"), failing, workspace=False)
    assert os.listdir() == ["work"]


@pytest.mark.parametrize("out", ["file", "file/sub", "x" * 300])
def test_out_that_can_be_no_folder_is_one_line(out):
    Path("file").write_text("mine")
    with pytest.raises(UserError, match=r"holds another result|cannot be used"):
        store.make(node(leaf=out), forbidden, workspace=False)
    assert Path("file").read_text() == "mine"


def test_upstream_replaced_while_it_is_read_gives_no_result():
    parent = node(leaf="results/n/embed")
    store.make(parent, writer("1"))

    def raced(made, out, scratch):
        store.make(replace(parent, key="c" * 64), writer("2"))
        (out / "payload").write_text("of both")

    child = node(key="b" * 64, inputs={"embeddings": parent})
    with pytest.raises(UserError, match="results/n/embed changed while it was read"):
        store.make(child, raced)
    assert not Path(child.leaf).exists()


def test_file_replaced_while_it_is_read_gives_no_result():
    Path("rows.jsonl").write_text("1")

    def raced(made, out, scratch):
        Path("rows.jsonl").write_text("2")

    with pytest.raises(UserError, match=r"rows\.jsonl changed while it was read"):
        store.make(replace(node(), files={"source": Path("rows.jsonl")}), raced)


@pytest.mark.parametrize("manifest", ["{}", '{"stage": "embed"}', '{"params": null}'])
def test_leaf_made_by_hand_counts_as_its_files(manifest):
    Path("hand").mkdir()
    Path("hand/manifest.json").write_text(manifest)
    Path("hand/x").write_text("1")
    first = store.load_node(Path("hand"), "embed")
    store.input_digest(first)
    Path("hand/x").write_text("2")
    assert store.load_node(Path("hand"), "embed").key != first.key
    with pytest.raises(UserError, match="wanted"):
        store.input_digest(first)


HOLD = (
    "import sys\nfrom pathlib import Path\nfrom cluster_sft.claims import claimed\n"
    "with claimed(Path(sys.argv[1])) as scratch:\n"
    "    (scratch / 'checkpoint').write_text('7')\n    print('held', flush=True)\n    input()\n"
)


@contextmanager
def held(scratch):
    """Another process that holds a scratch folder, until it is told to end or killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(scratch)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as child:
        try:
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_live_process_making_the_same_result_is_named_and_waited_for(end, capsys):
    with held(Path("work") / ("a" * 64)) as child, ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.make, node(), writer("1"))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1)
        if end == "killed":
            child.kill()
        else:
            child.stdin.write("\n")
            child.stdin.flush()
        assert waiting.result(timeout=60) == "computed"
    told = capsys.readouterr().err
    assert f"process {child.pid} on " in told and "is making this very result; waiting" in told


def test_leaves_of_one_key_made_side_by_side_are_computed_once():
    def slow(made, out, scratch):
        computed.append(made.leaf)
        time.sleep(0.5)
        writer("1")(made, out, scratch)

    computed: list[str] = []
    leaves = [f"results/x/stage/{name}" for name in "abcd"]
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda leaf: store.make(node(leaf=leaf), slow), leaves))
    assert sorted(told) == ["computed", "restored", "restored", "restored"]
    assert len(computed) == 1 and all(read(leaf) == "1" for leaf in leaves)


def test_result_that_another_process_finished_meanwhile_is_reused(monkeypatch):
    plain = store.claimed

    @contextmanager
    def slow(scratch):
        monkeypatch.setattr(store, "claimed", plain)
        store.make(node(), writer("theirs"))
        with plain(scratch) as held:
            yield held

    monkeypatch.setattr(store, "claimed", slow)
    assert store.make(node(), forbidden) == "reused"
    assert read() == "theirs" and os.listdir("work/kept") == ["a" * 64]


def test_failed_stage_of_its_own_leaves_nothing_beside_out():
    def failing(made, out, scratch):
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        store.make(node(leaf="sub/out"), failing, workspace=False)
    assert not Path("sub").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a tiny tmpfs needs root")
@pytest.mark.parametrize("kind", ["table", "array", "file"])
def test_full_disk_is_one_line_and_leaves_the_old_result(workspace, kind):
    import numpy as np
    import polars as pl

    from cluster_sft import artifacts

    store.make(node(), writer("old"))
    store.make(node(leaf="results/n/cluster/d"), writer("old"))

    def large(made, out, scratch):
        if kind == "array":
            artifacts.create_array(out / "x.npy", (1 << 20, 4), np.float32)
        elif kind == "table":
            names = np.random.default_rng(0).integers(0, 1 << 60, 1 << 18).astype(str)
            frame = pl.DataFrame({"id": names, "cluster": 0, "distance": 0.0})
            artifacts.write_table(out, "clusters.parquet", frame)
        else:
            (out / "x").write_bytes(b"x" * (1 << 22))

    Path("results/n/.partial").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "results/n/.partial"]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(UserError, match="the disk is full"):
            store.make(node("b" * 64), large)
        assert os.listdir("results/n/.partial") == []
    finally:
        subprocess.run(["umount", "results/n/.partial"], check=True)
    assert read() == "old"


def test_disk_full_to_the_last_byte_leaves_nothing_beside_out(workspace):
    Path("small").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", "small"], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        Path("small/full").write_bytes(bytes(8192))
        with pytest.raises(UserError, match="the disk is full"):
            store.make(node(leaf="small/out"), forbidden, workspace=False)
        assert os.listdir("small") == ["full"]
    finally:
        subprocess.run(["umount", "small"], check=True)


def test_results_finished_at_the_same_time_do_not_remove_each_others_folder(workspace):
    def make(i):
        one = node(key=f"{i:064x}", leaf=f"results/n/cluster/c{i}")
        store.make(one, lambda _, out, scratch: (out / "a.txt").write_text("x"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(200)))
    assert len(os.listdir("results/n/cluster")) == 200
