import sys
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from rollfeed.app import load_model
from rollfeed.benchmarks.engine import EngineWorkload, bench_engine
from rollfeed.benchmarks.engine_servers import bench_servers
from rollfeed.errors import ConfigError


def test_the_engine_bench_compares_equal_work(tiny_checkpoint: Path) -> None:
    told: list[str] = []
    workload = EngineWorkload(num_groups=2, n_samples_per_prompt=2, new_tokens=4, repetitions=1)
    result = bench_engine(load_model(str(tiny_checkpoint)), threads=[1], workload=workload, progress=told.append)
    assert result["threads"] == 1
    assert result["ratio"] > 0
    assert result["ratio_int8"] > 0
    assert result["greedy_outputs_identical"]
    assert result["max_logprob_difference"] < 1e-4
    assert result["step_milliseconds"]["attention"] > 0
    whole = result["step_milliseconds"]["whole"]
    assert sum(result["step_milliseconds"].values()) == pytest.approx(2 * whole, rel=0.01, abs=0.01)  # rounded
    assert result["traffic_floor_milliseconds"] > 0
    assert len(told) == 3


LLAMA_SERVER = f"""#!{sys.executable}
import argparse, json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from gguf import GGUFReader

parser = argparse.ArgumentParser()
for name in ("model", "host", "port", "threads", "parallel", "ctx-size"):
    parser.add_argument("--" + name)
arguments = parser.parse_args()
assert {{tensor.tensor_type.name for tensor in GGUFReader(arguments.model).tensors}} == {{"F32"}}

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({{"tokens_predicted": body["n_predict"]}})

    def answer(self, content):
        encoded = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer((arguments.host, int(arguments.port)), Handler).serve_forever()
"""


@pytest.fixture
def llama_server(tmp_path: Path) -> Path:
    """What answers as llama.cpp's server does, if it is given a model in float32."""
    path = tmp_path / "llama-server"
    path.write_text(LLAMA_SERVER)
    path.chmod(0o755)
    return path


def gguf_of_halves(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "half.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.arange(8, dtype=np.float16).reshape(2, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "half.gguf"


def test_servers_are_compared_over_http_with_equal_work(
    tiny_checkpoint: Path, llama_server: Path, tmp_path: Path, leaves_no_process: None
) -> None:
    told: list[str] = []
    rates = bench_servers(
        load_model(str(tiny_checkpoint)),
        gguf_file=gguf_of_halves(tmp_path),
        vllm_python=None,
        llama_server=llama_server,
        threads=1,
        workload=EngineWorkload(num_groups=2, n_samples_per_prompt=2, new_tokens=4, repetitions=1),
        progress=told.append,
    )
    assert {size: set(by_name) for size, by_name in rates.items()} == {
        "4": {"rollfeed", "llama.cpp"},
        "1": {"rollfeed", "llama.cpp"},
    }
    assert all(rate > 0 for by_name in rates.values() for rate in by_name.values())
    assert len(told) == 4


def test_a_server_that_is_not_there_or_ends_is_told_in_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    compare = partial(
        bench_servers,
        load_model(str(tiny_checkpoint)),
        vllm_python=None,
        threads=1,
        workload=EngineWorkload(),
        progress=print,
    )
    with pytest.raises(ConfigError, match="needs a model from a GGUF file"):
        compare(gguf_file=None, llama_server=Path("/bin/false"))
    with pytest.raises(ConfigError, match=r"llama\.cpp: cannot be started"):
        compare(gguf_file=gguf_of_halves(tmp_path), llama_server=tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"llama\.cpp: does not answer .*it ended"):
        compare(gguf_file=tmp_path / "half.gguf", llama_server=Path("/bin/false"))
