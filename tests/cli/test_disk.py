"""Test the output and the exit codes of `hotrow disk`."""

from pathlib import Path

from hotrow import disk
from tests.support.command_line import Run


def test_verify_reports_an_undamaged_folder(run_hotrow: Run, tmp_path: Path) -> None:
    disk.create(tmp_path / "t", 10, 4).close()
    result = run_hotrow("disk", "verify", str(tmp_path / "t"))
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{tmp_path / 't'}: 160 bytes match their checksums\n"


def test_verify_names_damaged_rows(run_hotrow: Run, tmp_path: Path) -> None:
    disk.create(tmp_path / "t", 10, 4).close()
    path = tmp_path / "t" / "weight.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    result = run_hotrow("disk", "verify", str(tmp_path / "t"))
    assert (result.code, result.out) == (2, "")
    assert "weight.safetensors is damaged (the checksum of rows 0 to 9 does not match" in (
        result.err
    )
    assert run_hotrow("disk", "verify", str(tmp_path / "none")).code == 2
