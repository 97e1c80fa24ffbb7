from collections.abc import Callable
from pathlib import Path
from typing import Any

NOBODY = "http://127.0.0.1:9"


def test_check_says_which_servers_do_not_answer(
    settings_file: Callable[..., Path], rollfeed: Callable[..., Any]
) -> None:
    servers = ("--servers", "--set", f'engine.sglang.workers=["{NOBODY}"]')
    ran = rollfeed("check", settings_file(), "--json", *servers)
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert [each["address"] for each in ran.json["servers"]] == [NOBODY]
    assert ran.err.startswith(f"rollfeed: {NOBODY}/health: ")
    assert ran.err.count("\n") == 1


def test_check_has_no_servers_to_ask_where_the_embedded_engine_answers(
    settings_file: Callable[..., Path], rollfeed: Callable[..., Any]
) -> None:
    ran = rollfeed("check", settings_file(), "--servers")
    assert ran.code == 2
    assert "--servers: the embedded engine answers here" in ran.err
