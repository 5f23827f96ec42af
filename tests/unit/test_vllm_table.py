"""What ``[agent.vllm]`` refuses."""

import msgspec
import pytest

from edge_agent.config import VllmTable


def test_policies_cannot_have_more_memory_than_there_is():
    VllmTable(memory_shares={"a": 0.7, "b": 0.3})
    table = {"memory_shares": {"solver": 0.7, "verifier": 0.35}}
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(table, VllmTable)
    for word in ("memory_shares.solver = 0.7", "memory_shares.verifier = 0.35", "1.05"):
        assert word in str(refused.value)
