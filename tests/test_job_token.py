"""Where a token comes from, and what is a part of it."""

import pytest

from tpu_sync_rl.job_token import resolve_token


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("TSR_TOKEN", raising=False)
    monkeypatch.delenv("TSR_TOKEN_FILE", raising=False)


def test_token_comes_from_argument_then_environment_then_file(monkeypatch, tmp_path):
    assert resolve_token(None) == b""
    file = tmp_path / "token"
    file.write_text("from file\n")
    monkeypatch.setenv("TSR_TOKEN_FILE", str(file))
    assert resolve_token(None) == b"from file"
    monkeypatch.setenv("TSR_TOKEN", "from environment")
    assert resolve_token(None) == b"from environment"
    assert resolve_token("from argument") == b"from argument"


@pytest.mark.parametrize("text", ["se cret", "se cret\n", "se cret\r\n", " se cret\t\n\n"])
def test_white_space_around_a_token_is_no_part_of_it(monkeypatch, tmp_path, text):
    assert resolve_token(text) == resolve_token(text.encode()) == b"se cret"
    monkeypatch.setenv("TSR_TOKEN", text)
    assert resolve_token(None) == b"se cret"
    monkeypatch.delenv("TSR_TOKEN")
    (tmp_path / "token").write_bytes(text.encode())
    monkeypatch.setenv("TSR_TOKEN_FILE", str(tmp_path / "token"))
    assert resolve_token(None) == b"se cret"


@pytest.mark.parametrize("text", ["", "\n", b" \t"])
def test_empty_token_is_refused(text):
    with pytest.raises(ValueError, match="the token is empty"):
        resolve_token(text)


def test_token_that_no_environment_can_hold_is_refused():
    with pytest.raises(ValueError, match="NUL byte"):
        resolve_token(b"a\0b")


def test_token_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="token must be a str or bytes, not a int"):
        resolve_token(5)


def test_missing_token_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TSR_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"TSR_TOKEN_FILE=.*none: No such file"):
        resolve_token(None)
