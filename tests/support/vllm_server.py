"""A real vLLM server, as users start theirs."""

import os
import re
import socket
import subprocess
import sys
import time

from edge_agent.config import OpenaiServer
from edge_agent.engines.openai_wire import Address
from transport.errors import EngineError

START_S, LOOK_S, CALL_S = 480.0, 0.5, 30.0
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "OMP_NUM_THREADS": "1",
}
TAKES_WEIGHTS = (
    "--enable-scale-out",
    "--worker-extension-cls",
    "edge_agent.engines.openai_worker.FarflowServerExtension",
)


class VllmServer:
    """Serves ``folder`` as ``model``, after ``wait``. Its output is in ``log``."""

    def __init__(self, folder, model, log, *arguments):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._address = Address(OpenaiServer(base_url=self.url))
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--served-model-name", model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "256"),
            *("--max-num-seqs", "16", "--kv-cache-memory-bytes", "50000000"),
            *("--logprobs-mode", "processed_logprobs"),
            *arguments,
        ]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **SETTINGS}
            )

    def wait(self):
        """Until it answers; ends it if it does not."""
        looks = int(START_S / LOOK_S)
        while not self._answers():
            looks -= 1
            if self._process.poll() is not None or not looks:
                self.stop()
                raise RuntimeError(f"vLLM did not start: {self._log.read_text()[-3000:]}")
            time.sleep(LOOK_S)

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def requests(self):
        """How many requests it has, running and waiting, as its metrics say."""
        page = self._address.call("GET", "/metrics", within_s=CALL_S).decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", page, re.M)
        assert len(found) == 2, page[:500]
        return sum(float(number) for number in found)

    def post(self, path):
        self._address.call("POST", path, {}, within_s=CALL_S)

    def _answers(self):
        try:
            self._address.call("GET", "/health", within_s=CALL_S)
        except EngineError:
            return False
        return True
