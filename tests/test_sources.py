"""Sources: kinds, encodings and compressions read; defects named with file, place and remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
import zstandard

from cluster_sft import descriptors, sources
from cluster_sft.errors import UserError
from cluster_sft.offline import NotFetchedError

ROWS = [{"instruction": f"q{i}", "output": f"a{i}\u2028ü", "n": i} for i in range(3)]
JSONL = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS)


def written(tmp_path, data: bytes | str, name: str = "data.jsonl"):
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        JSONL.encode(),
        ("\ufeff" + JSONL.replace("\n", "\r\n") + "\r\n \r\n").encode(),
        JSONL.rstrip("\n").encode(),
        json.dumps(ROWS).encode(),
        ("\n " + json.dumps(ROWS, indent=2)).encode(),
        json.dumps({"version": 1, "data": ROWS}, indent=2).encode(),
        gzip.compress(JSONL.encode()),
        gzip.compress(JSONL[:10].encode()) + gzip.compress(JSONL[10:].encode()),
        zstandard.compress(JSONL.encode()),
        zstandard.compress(JSONL[:10].encode()) + zstandard.compress(JSONL[10:].encode()),
        gzip.compress(json.dumps(ROWS).encode()),
    ],
    ids=[
        "jsonl",
        "bom-crlf",
        "no-newline",
        "array",
        "indented",
        "wrapped",
        "gz",
        "gz-twice",
        "zst",
        "zst-twice",
        "array-gz",
    ],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data"])
def test_read_every_kind_gives_the_same_rows_whatever_the_name(tmp_path, data, name):
    assert sources.read(written(tmp_path, data, name)).rows == ROWS


def test_read_parquet_gives_the_same_rows(tmp_path):
    pl.DataFrame(ROWS).write_parquet(tmp_path / "data.parquet")
    assert sources.read(tmp_path / "data.parquet").rows == ROWS


def test_read_one_row_over_several_lines_is_one_row(tmp_path):
    assert sources.read(written(tmp_path, json.dumps(ROWS[0], indent=1))).rows == ROWS[:1]


def test_read_keeps_numbers_json_has_no_word_for(tmp_path):
    (row,) = sources.read(written(tmp_path, '{"a": NaN, "b": -Infinity}')).rows
    assert row["a"] != row["a"]
    assert row["b"] == float("-inf")


BROKEN = "".join(f'{{"n": {i}}}\n' for i in range(1, 37)) + '{"n": 37,\n{"n": 38}\n'
DEEP = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "the file is empty"),
        ("\n \r\n", "the file is empty"),
        (b"\xef\xbb\xbf\n", "the file is empty"),
        ("[]", "holds no rows"),
        (BROKEN, r"line 37: not valid JSON \(.* at column 10\); repair or remove it"),
        (json.dumps(ROWS, indent=1)[:-40], r"line 1\d: not valid JSON"),
        ('{"a": 1', "line 1: not valid JSON"),
        ("instruction,output\nq,a\n", "does not start like JSON, got 'instruction,output'"),
        (JSONL.encode("utf-16"), "UTF-16.*iconv -f UTF-16 -t UTF-8"),
        (JSONL.encode("utf-16-le"), "UTF-16.*iconv -f UTF-16 -t UTF-8"),
        (
            b'{"a": 1}\n' * 4 + '{"a": "ü"}\n'.encode("latin-1"),
            "line 5: byte 0xfc is not UTF-8; if the file is Latin-1 convert it: iconv",
        ),
        ('{"a": 1}\n7\n', r"row 1 \(line 2\): a row must be an object of named fields, got int"),
        ('[{"a": 1}, "b"]', "row 1: a row must be an object"),
        ('{"a": 1}\n{"b": 1, "b": 2}\n', "line 2: .*key 'b' stands twice"),
        (DEEP, "line 1: not"),
        (gzip.compress(JSONL.encode())[:-12], "damaged compressed file"),
        (zstandard.compress(JSONL.encode())[:-6], "damaged compressed file"),
        (b"BZh91AY", "bzip2 is not supported; use plain, .gz or .zst"),
        (b"PAR1 and nothing else", "damaged Parquet file"),
    ],
    ids=lambda v: None if isinstance(v, bytes) or len(v) > 60 else v,
)
def test_read_defects_of_the_file_name_the_place_and_the_remedy(tmp_path, data, message):
    path = written(tmp_path, data)
    with pytest.raises(UserError, match=message) as caught:
        sources.read(path)
    assert str(caught.value).startswith(str(path))


def test_read_missing_file_and_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match=r"no such file; data\.source must name"):
        sources.read(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        sources.read(tmp_path)


def test_read_place_of_a_row_counts_blank_lines(tmp_path):
    source = sources.read(written(tmp_path, '{"a": 1}\n\n{"a": 2}\n'))
    assert source.where(1).endswith("data.jsonl, row 1 (line 3)")


def test_descriptor_corpus_gives_its_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(descriptors.CORPORA, "python-stdlib", lambda: ROWS)
    assert sources.read(written(tmp_path, "corpus: python-stdlib\n", "data.yaml")).rows == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("corpus: python-stdlb", "unknown corpus 'python-stdlb'; did you mean 'python-stdlib'"),
        ("hub: a/b\nrevison: x", "unknown key 'revison'; did you mean 'revision'"),
        ("fields: {}", "either `corpus: NAME` or `hub: OWNER/NAME`"),
        ("- hub", "must be a mapping of keys, got list"),
        ("hub: a/b\ncorpus: python-stdlib", "either `corpus: NAME` or `hub: OWNER/NAME`"),
        ("hub: 3", "'hub' must be text"),
        ("hub: a/b\nfields: [x]", "'fields' must be text"),
        ("hub: [", "not valid YAML"),
    ],
)
def test_descriptor_defects_are_errors(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        sources.read(written(tmp_path, text, "data.yaml"))


def test_descriptor_hub_asks_for_revision_split_and_subset(tmp_path, monkeypatch):
    import datasets

    asked = {}

    def load_dataset(path, **options):
        asked.update(options, path=path)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text = "hub: o/n\nrevision: abc\nsplit: test\nsubset: s\nfields: {category: n}\n"
    source = sources.read(written(tmp_path, text, "data.yaml"))
    assert source.rows == ROWS
    assert source.fields == {"category": "n"}
    assert asked == {"path": "o/n", "name": "s", "revision": "abc", "split": "test"}


def test_descriptor_hub_that_does_not_deliver_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    path = written(tmp_path, "hub: nobody/nothing-at-all\nrevision: main\n", "data.yaml")
    with pytest.raises(UserError, match=r"Hub did not deliver nobody/nothing-at-all.*data\.source"):
        sources.read(path)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> None:
    """A cache of data sets that holds own/rows at COMMIT, as `datasets` lays it out."""
    import datasets

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = {"data_files": str(rows), "cache_dir": str(tmp_path)}
    made = datasets.load_dataset("json", split="train", **given)
    source = Path(made.cache_files[0]["filename"]).parent
    target = tmp_path / "own___rows" / "default" / "0.0.0" / COMMIT
    target.mkdir(parents=True)
    (source / "json-train.arrow").rename(target / "rows-train.arrow")
    info = json.loads((source / "dataset_info.json").read_text())
    info |= {"config_name": "default", "dataset_name": "rows"}
    (target / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_descriptor_hub_is_read_from_the_cache_without_network(tmp_path, hub_cache, revision):
    text = f"hub: own/rows\nrevision: '{revision}'\n"
    assert sources.read(written(tmp_path, text, "data.yaml")).rows == ROWS


def test_descriptor_hub_takes_no_other_revision_from_the_cache(tmp_path, hub_cache):
    """`datasets` would take the newest that it has and say so in a warning."""
    path = written(tmp_path, f"hub: own/rows\nrevision: {'f' * 40}\n", "data.yaml")
    with pytest.raises(NotFetchedError, match="at commit 0123456789ab alone, not at ffffffffffff"):
        sources.read(path)


def test_descriptor_hub_branch_counts_as_what_it_was_when_the_hub_was_asked(tmp_path, hub_cache):
    path = written(tmp_path, "hub: own/rows\nrevision: v2\n", "data.yaml")
    with pytest.raises(NotFetchedError, match="'v2', whose commit is not known"):
        sources.read(path)
    refs = tmp_path / "hub/datasets--own--rows/refs"
    refs.mkdir(parents=True)
    (refs / "v2").write_text(COMMIT)
    assert sources.read(path).rows == ROWS


def test_descriptor_hub_not_in_the_cache_is_missing_offline(tmp_path, hub_cache):
    path = written(tmp_path, "hub: own/others\n", "data.yaml")
    with pytest.raises(NotFetchedError, match=r"own/others .*run: cluster-sft fetch"):
        sources.read(path)
