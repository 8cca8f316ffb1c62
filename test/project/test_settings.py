"""The environment variables: parsing, refusals, where the log goes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn import settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(settings.LOG_INFO.name, raising=False)
    monkeypatch.delenv(settings.LOG_FILE.name, raising=False)
    settings.configure_logging()
    yield
    monkeypatch.undo()
    settings.configure_logging()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("", False)])
def test_flags(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv(settings.LOG_INFO.name, text)
    assert settings.LOG_INFO.get() is value


def test_a_wrong_value_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.LOG_INFO.name, "perhaps")
    with pytest.raises(ValueError, match=r"CUDNN_FRONTEND_LOG_INFO: got 'perhaps'; allowed: 1 or 0\. To fix it"):
        settings.LOG_INFO.get()


def test_folders_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.LIBRARY_FOLDERS.name, "/a:/b::")
    assert settings.LIBRARY_FOLDERS.get() == ("/a", "/b")


def test_silent_without_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    logger = settings.configure_logging()
    logger.info("unheard")
    assert not logger.isEnabledFor(logging.INFO)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_log_to_a_standard_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: str
) -> None:
    monkeypatch.setenv(settings.LOG_INFO.name, "1")
    monkeypatch.setenv(settings.LOG_FILE.name, stream)
    settings.configure_logging().info("heard once")
    settings.configure_logging()
    assert getattr(capsys.readouterr(), "out" if stream == "stdout" else "err") == "heard once\n"


def test_log_to_a_file_and_off_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    monkeypatch.setenv(settings.LOG_INFO.name, "1")
    monkeypatch.setenv(settings.LOG_FILE.name, str(path))
    settings.configure_logging().info("first")
    monkeypatch.setenv(settings.LOG_INFO.name, "0")
    settings.configure_logging().info("second")
    assert path.read_text() == "first\n"


def test_table_lists_every_variable() -> None:
    table = settings.markdown_table()
    assert all(f"`{setting.name}`" in table for setting in settings.SETTINGS)
