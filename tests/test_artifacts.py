"""Artifacts: exact schemas, and one line for whatever is wrong with a file."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from cluster_sft import artifacts
from cluster_sft.errors import UserError

TABLE = pl.DataFrame({"id": ["a", "b"], "cluster": [0, 1], "distance": [0.5, 1.5]})


def test_table_round_trips_with_the_dtypes_of_its_schema(tmp_path):
    artifacts.write_table(tmp_path, "clusters.parquet", TABLE)
    found = artifacts.read_table(tmp_path, "clusters.parquet")
    assert dict(found.schema) == artifacts.CLUSTERS
    assert found.rows() == [("a", 0, 0.5), ("b", 1, 1.5)]


def test_table_of_another_schema_is_one_line(tmp_path):
    TABLE.cast({"cluster": pl.String}).write_parquet(tmp_path / "clusters.parquet")
    with pytest.raises(UserError, match=r"column 'cluster' must be Int32, got String"):
        artifacts.read_table(tmp_path, "clusters.parquet")


def test_numbers_of_another_width_are_read_as_those_of_the_schema(tmp_path):
    TABLE.write_parquet(tmp_path / "clusters.parquet")
    assert dict(artifacts.read_table(tmp_path, "clusters.parquet").schema) == artifacts.CLUSTERS
    huge = TABLE.with_columns(cluster=pl.lit(1 << 40))
    huge.write_parquet(tmp_path / "clusters.parquet")
    with pytest.raises(UserError, match=r"clusters\.parquet: damaged"):
        artifacts.read_table(tmp_path, "clusters.parquet")


@pytest.mark.parametrize("keep", [0, 3, 100, 400])
def test_truncated_table_is_one_line(tmp_path, keep):
    artifacts.write_table(tmp_path, "clusters.parquet", TABLE)
    path = tmp_path / "clusters.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="damaged") as caught:
        artifacts.read_table(tmp_path, "clusters.parquet")
    assert len(str(caught.value).splitlines()) == 1


def test_every_flipped_byte_of_a_table_reads_or_is_one_line(tmp_path):
    artifacts.write_table(tmp_path, "clusters.parquet", TABLE)
    path = tmp_path / "clusters.parquet"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        try:
            artifacts.read_table(tmp_path, "clusters.parquet")
        except UserError as error:
            assert str(path) in str(error)


def test_missing_table_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"clusters\.parquet: no such file"):
        artifacts.read_table(tmp_path, "clusters.parquet")


def test_array_written_by_blocks_is_a_plain_npy(tmp_path):
    array = artifacts.create_array(tmp_path / "x.npy", (3, 2), np.float16)
    array[1] = 2
    array.flush()
    assert np.load(tmp_path / "x.npy").tolist() == [[0, 0], [2, 2], [0, 0]]
    found = artifacts.read_array(tmp_path / "x.npy", ndim=2, dtype=np.float16)
    assert isinstance(found, np.memmap) and not found.flags.writeable


@pytest.mark.parametrize("harm", ["truncate", "dtype", "rank", "pickle", "missing"])
def test_faulty_array_is_one_line(tmp_path, harm):
    path = tmp_path / "x.npy"
    made = {"dtype": np.zeros((2, 2)), "rank": np.zeros(2, np.float16)}
    made["pickle"] = np.array([{}], dtype=object)
    if harm != "missing":
        np.save(path, made.get(harm, np.zeros((64, 64), np.float16)))
    if harm == "truncate":
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"x\.npy: (damaged|must have|no such file)"):
        artifacts.read_array(path, ndim=2, dtype=np.float16)


def test_embeddings_and_samples_of_unequal_length_are_refused(tmp_path):
    np.save(tmp_path / "embeddings.npy", np.zeros((3, 2), np.float16))
    samples = pl.DataFrame({"id": ["a"], "n_tokens": [1], "nll": [0.5], "proxy_norm": [1.0]})
    artifacts.write_table(tmp_path, "samples.parquet", samples)
    with pytest.raises(UserError, match=r"embeddings\.npy has 3 rows, samples\.parquet 1"):
        artifacts.read_embeddings(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_broken_json_is_one_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json: "):
        artifacts.read_json(tmp_path / "x.json")
