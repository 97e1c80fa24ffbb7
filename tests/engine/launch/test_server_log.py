"""The line that is made of a server's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfeed.engine.launch.server_log import explained

VLLM = """\
\x1b[0;36m(APIServer pid=7)\x1b[0;0m INFO 11-29 21:00:00 [kv_cache.py:9] GPU KV cache size: 1,024 tokens
(EngineCore pid=8) ERROR 11-29 21:00:01 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""
SGLANG = """\
[21:00] Ignore import error when loading sglang.srt.models.falcon_mamba: cannot import name 'causal_conv1d_fn'
[21:01] max_total_num_tokens=20000 KV cache
[21:02] kill_process_tree called: pid=7
"""


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        (
            VLLM,
            1,
            "with exit code 1; LOG ends with: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB | "
            "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.; give it",
        ),
        (SGLANG, 137, "by signal SIGKILL; LOG ends with: [21:02] kill_process_tree called: pid=7; look there"),
        ("", 255, "with exit code 255; LOG"),
        ("", 127, "before it began; LOG ends with: nothing; look there"),
        ("python: No module named sglang\n", 1, "sglang; set engine.launch.command to a program that has it"),
        ("OSError: [Errno 98] error while attempting to bind", None, "LOG ends with: OSError: [Errno 98] error while"),
    ],
)
def test_the_cause_is_found_in_what_this_start_has_written(
    tmp_path: Path, text: str, code: int | None, line: str
) -> None:
    log = tmp_path / "0.log"
    earlier = "ValueError: of an earlier start\n"
    log.write_text(earlier + text)
    assert line in explained(log, len(earlier), code).replace(str(log), "LOG")
