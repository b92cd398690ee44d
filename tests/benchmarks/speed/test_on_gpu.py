"""The short measurement of engines: names that it does not know are refused before anything is measured."""

from __future__ import annotations

import sys

import pytest

from benchmarks.speed import on_gpu


@pytest.mark.parametrize(("flag", "name"), [("--precisions", "fp16"), ("--workloads", "gtp")])
def test_unknown_names_are_refused(
    flag: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpu", flag, name])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert f"unknown name '{name}'; choose from" in capsys.readouterr().err
