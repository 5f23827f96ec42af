"""What a vLLM server loads to let an agent outside it change and read its weights.

The server is started with ``--worker-extension-cls`` and the class here. It adds nothing to what
``vllm_worker`` does, except that calls and answers are JSON, as the server's ``/collective_rpc``
needs: bytes travel as Base64.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence

from edge_agent.engines.vllm_worker import FarflowExtension


class FarflowServerExtension(FarflowExtension):
    """Calls that an agent makes on every worker through HTTP."""

    def farflow_json_record(self, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> list[str]:
        """See ``farflow_record``."""
        return [b64encode(self.farflow_record(tensors)).decode()]

    def farflow_json_staged(self) -> list[bool | str]:
        """See ``farflow_staged``."""
        return list(self.farflow_staged())

    def farflow_json_read_cells(self, asked: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
        """See ``farflow_read_cells``."""
        decoded = [[(storage, b64decode(at)) for storage, at in rank] for rank in asked]
        return [b64encode(cells).decode() for cells in self.farflow_read_cells(decoded)]
