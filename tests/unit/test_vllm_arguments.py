"""What is said of a vLLM that did not start."""

from pathlib import Path

from edge_agent.engines.vllm_arguments import start_fault
from transport.errors import EngineCrashed, ModelError


def test_where_the_reason_is_that_vllm_does_not_give():
    words = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    fault = start_fault(Path("m"), RuntimeError(words))
    assert isinstance(fault, EngineCrashed)
    for part in ("agent's log", "ERROR", "kv_cache_gib", words):
        assert part in str(fault)


def test_what_is_wrong_before_a_process_starts_is_about_the_model_or_the_settings():
    fault = start_fault(Path("m"), ValueError("max_model_len 10000000"))
    assert isinstance(fault, ModelError)
    assert "m: vLLM does not take it: ValueError: max_model_len 10000000" in str(fault)
