"""FP8 beside what Triton, vLLM and SGLang make of the same matrices, in their own environments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.engines.servers import OFFLINE, STAND_INS, python_of

pytestmark = pytest.mark.engines
HERE = Path(__file__).parent


@pytest.mark.parametrize(("what", "where"), [("triton", "sglang"), ("vllm", "vllm"), ("sglang", "sglang")])
def test_codes_and_scales_are_those_of(what: str, where: str) -> None:
    paths = [str(HERE.parents[1] / "src"), *([str(STAND_INS)] if where == "sglang" else [])]
    environment = {
        **os.environ,
        **OFFLINE,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1" if what == "triton" else "0",
    }
    command = [str(python_of(where)), "-W", "ignore", str(HERE / "fp8_elsewhere.py"), what]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split()[-2]) >= 5
