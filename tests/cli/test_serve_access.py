"""Servers that others can reach need a key, whichever it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfeed.cli.arguments import server_key
from rollfeed.cli.main import build_parser, main
from rollfeed.errors import ConfigError

SERVERS = {
    "engine": ("--key-env", True),
    "reward": ("--key-env", True),
    "router": ("--api-key-env", True),
    "gateway": ("--operator-key-env", False),
    "weights": ("--key-env", False),
}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
@pytest.mark.parametrize("server", SERVERS)
def test_x05_a_server_that_others_reach_is_refused_without_a_key(
    server: str, host: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    option, may_do_without = SERVERS[server]
    folder = ["--folder", str(tmp_path)] if server == "weights" else []
    assert main(["serve", server, "--host", host, *folder]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"--host {host}: others can reach it: put a key into a variable, and name that as {option}" in line
    assert ("--no-key" in line) is may_do_without


@pytest.mark.parametrize("server", SERVERS)
def test_x05_with_a_key_or_told_to_do_without_it_may_be_reached(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option, may_do_without = SERVERS[server]
    folder = ["--folder", str(tmp_path)] if server == "weights" else []
    monkeypatch.setenv("SERVER_KEY", "secret")
    parse = build_parser("serve").parse_args
    usual = ["serve", server, "--host", "0.0.0.0", *folder]
    assert server_key(parse([*usual, option, "SERVER_KEY"]), option).value == "secret"
    monkeypatch.setenv("SERVER_KEY", "")
    with pytest.raises(ConfigError, match="has no key in it"):
        server_key(parse([*usual, option, "SERVER_KEY"]), option)
    if may_do_without:
        assert server_key(parse([*usual, "--no-key"]), option).value is None
