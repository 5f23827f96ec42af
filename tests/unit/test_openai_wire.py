"""What a server says that nobody could expect, and how long it is listened to."""

import socket
import threading

import pytest

from edge_agent.config import OpenaiServer
from edge_agent.engines.openai_wire import Address, ServerAway, fault, read_answer
from transport.errors import GenerationFailed

DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    "data",
    [
        DEEP,
        b'{"error": ' + DEEP,
        b'{"unknown": ' + DEEP,
        b'{"choices": [{"token_ids": ' + DEEP,
        b'{"error": "\xff"}',
    ],
)
def test_whatever_comes_is_a_failed_request(data):
    with pytest.raises(GenerationFailed):
        read_answer(data, "there")
    assert "HTTP 500" in str(fault(500, data, None, "there"))


class Dripping:
    """A server that sends ``begins``, and from then on a byte now and then."""

    def __init__(self, begins):
        self.begins = begins
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.over = threading.Event()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.drip, args=(link,), daemon=True).start()

    def drip(self, link):
        with link:
            try:
                link.recv(65536)
                link.sendall(self.begins)
                while not self.over.wait(0.05):
                    link.sendall(b" ")
            except OSError:
                return

    def end(self):
        self.over.set()
        self.listener.close()


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "begins",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Header: ",
        b"",
    ],
)
def test_an_answer_without_end_is_not_waited_for(begins):
    """Each byte renews a socket's own limit."""
    server = Dripping(begins)
    try:
        with pytest.raises(ServerAway, match="not all of its answer came within"):
            Address(OpenaiServer(base_url=server.url)).call("GET", "/v1/models", within_s=0.4)
    finally:
        server.end()
