"""Clock of a job: what a killed run had noted counts."""

from __future__ import annotations

from cluster_sft.artifacts import read_json, write_json
from cluster_sft.clocks import Clock


def test_clock_goes_on_from_what_an_interrupted_run_had_noted(tmp_path):
    path = tmp_path / "seconds.json"
    Clock(path).note()
    assert 0 < read_json(path)["seconds"] < 100
    write_json(path, {"seconds": 1000.0})
    clock = Clock(path)
    assert clock.earlier == 1000
    clock.note()
    assert 1000 < read_json(path)["seconds"] < 1100
    assert clock.earlier == 1000
