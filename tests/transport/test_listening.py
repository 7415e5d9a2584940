import stat
from pathlib import Path

import pytest

from clawq.errors import UserError
from clawq.transport.listening import Address, Tcp, Tls, password_of
from clawq.transport.urls import is_loopback


def test_tcp_is_for_this_machine_unless_an_address_is_named() -> None:
    address = Address.tcp(Tcp(password="secret"), "data")
    assert is_loopback(address.url)
    assert address.arguments[2:4] == ("--bind", "127.0.0.1")
    assert "secret" not in " ".join(address.arguments)
    assert address.secret == 'requirepass "secret"'


@pytest.mark.parametrize("bind", ["0.0.0.0", "*", "::", "203.0.113.1"])
def test_other_machines_are_never_let_in_without_a_password(bind: str) -> None:
    with pytest.raises(UserError, match="without a password is open to everybody"):
        Tcp(bind=bind)
    assert Tcp(bind="127.0.0.1").local


def test_an_address_that_is_not_of_this_machine_is_told() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.1"):
        Address.tcp(Tcp(bind="203.0.113.1", password="x"), "broker")


def test_a_password_is_made_once_kept_private_and_never_empty(tmp_path: Path) -> None:
    file = tmp_path / "password"
    made = password_of(file)
    assert len(made) >= 24
    assert password_of(file) == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for text in ("", "\n", "two words", 'quo"te'):
        file.write_text(text)
        with pytest.raises(UserError, match="must hold one password"):
            password_of(file)
    file.write_text("opensesame")
    file.chmod(0o640)
    with pytest.raises(UserError, match="others can read it; `chmod 600") as told:
        password_of(file)
    assert "opensesame" not in str(told.value)


def test_files_of_tls_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cert\.pem cannot be read"):
        Tls(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem")
