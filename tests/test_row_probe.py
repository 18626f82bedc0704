"""bloomery-probe engram on real files: the figures, the comparison of contents, the choice of the table, errors.

Planted once and seen to fail: a way that reads the rows before those asked for; a comparison with itself.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deepseek_data import tiny4, tiny41

from bloomery.launcher import probe, probe_engram
from bloomery.runtime import row_probe
from bloomery.runtime.errors import BloomeryError
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.row_probe import ADVISED, READER, probe_rows
from bloomery.runtime.row_reader import RowReader, RowTable


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "rows"
    with path.open("wb") as file:
        file.write(np.random.default_rng(1).bytes(3_000_000))
        os.fsync(file.fileno())
    return path


def test_figures_of_a_plain_file(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["engram", str(plain), "--rounds", "3", "--rows", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["row_bytes"], report["rows"], report["rounds"]) == (str(plain), 110, 20, 3)
    assert report["written_share"] > 0.99 and report["bulk_rows"] == 8192
    ways = {way["way"]: way for way in report["ways"]}
    assert len(ways) == 4 and ADVISED in ways and READER in ways
    for way in ways.values():
        assert 0 < way["cold_least"] <= way["cold"] <= way["cold_most"] < 10
        assert 0 < way["warm_least"] <= way["warm"] <= way["warm_most"] < 10
        assert way["cold_most"] > way["warm_least"]
    assert 0 < report["row_cache_seconds"] < 1 and report["bulk_warm"] > 0 and report["bulk_cold"] > 0


def test_the_table_for_people(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["engram", str(plain), "--rounds", "2", "--row-bytes", "272"]) == 0
    text = capsys.readouterr().out
    assert "48 random rows of 272 bytes" in text and "rows/s from disk" in text and ADVISED in text
    assert "holes" not in text


def test_holes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 4 << 20)
    if os.stat(path).st_blocks:
        pytest.skip("this file system has no holes")
    assert probe.main(["engram", str(path), "--rounds", "1"]) == 0
    assert "Only 0 % of the file is on the disk" in capsys.readouterr().out


def test_the_largest_table_of_a_model_file() -> None:
    path = tiny41("a")
    with ModelFile.open(path) as model:
        tables = [tensor for name, tensor in model.tensors.items() if name.endswith("engram_embd.weight")]
        assert len(tables) == 2
        table = probe_engram.find_table(path, None)
        [tensor] = [tensor for tensor in tables if tensor.offset == table.offset]
        assert table.rows == 630 and table.row_bytes == 110 and table.nbytes == tensor.nbytes
        reader = RowReader([table])
        out = np.empty((3, 110), np.uint8)
        reader.fetch([(np.array([0, 629, 5]), out)])
        np.testing.assert_array_equal(out, tensor.data.reshape(630, 110)[[0, 629, 5]])
        reader.close()
    assert probe_engram.find_table(path, 64).row_bytes == 64
    with pytest.raises(BloomeryError, match=r"has no n-gram table \(blk.N.engram_embd.weight\)"):
        probe_engram.find_table(tiny4(), None)


def test_errors(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BloomeryError, match="nowhere: cannot be read: No such file"):
        probe_engram.find_table(tmp_path / "nowhere", None)
    (tmp_path / "short").write_bytes(bytes(1000))
    with pytest.raises(BloomeryError, match="has 9 rows of 110 bytes, expected 48 or more"):
        probe_rows(probe_engram.find_table(tmp_path / "short", None))
    table = RowTable(str(plain), 0, 20_000, 110)
    monkeypatch.setattr(RowReader, "fetch", lambda self, wanted, done=None: None)
    with pytest.raises(BloomeryError, match="row reader read other bytes at"):
        row_probe.probe_rows(table, rounds=1)


def test_the_report_warns_of_cached_files(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = probe_rows(RowTable(str(plain), 0, 20_000, 110), rounds=1, bulk_rows=100)
    probe_engram.show_rows(replace(report, cached_share=0.5))
    assert "50 % of the file stayed in the page cache" in capsys.readouterr().out
