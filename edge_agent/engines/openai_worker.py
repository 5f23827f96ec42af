"""What a vLLM server loads to let an agent outside it change and read its weights.

The server is started with ``--worker-extension-cls`` and the class here. It adds nothing to what
``vllm_worker`` does, except that calls and answers are text, as the server's ``/collective_rpc``
needs: bytes travel as Base64.
"""

from base64 import b64decode, b64encode

from edge_agent.engines.vllm_worker import FarflowExtension


class FarflowServerExtension(FarflowExtension):
    """The call that an agent makes on every worker through HTTP."""

    def farflow_text_call(self, question: str) -> str:
        """See ``farflow_call``."""
        return b64encode(self.farflow_call(b64decode(question))).decode()
