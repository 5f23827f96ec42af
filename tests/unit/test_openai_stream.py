"""What is made of a whole answer."""

from types import SimpleNamespace

import pytest

from edge_agent.engine import GenerationRequest, SamplingParams
from edge_agent.engines.openai_stream import Drawing
from edge_agent.engines.openai_wire import Piece
from transport.errors import GenerationFailed


def completion(*pieces):
    request = GenerationRequest(
        request_id="r",
        policy="run/p",
        prompt_tokens=(4,),
        n=1,
        sampling=SamplingParams(max_new_tokens=8),
    )
    drawing = Drawing(SimpleNamespace(weights=None), request, 0, None, lambda tokens: None)
    drawing._pieces = [Piece(*each, ()) for each in pieces]
    return drawing._completion(3)


def test_pieces_are_put_together():
    found = completion(((5,), (-0.5,), None), ((6, 1), (-2.0, 1e-7), "stop"))
    assert (found.tokens, found.logprobs) == ((5, 6, 1), (-0.5, -2.0, 1e-7))
    assert (found.versions, found.finish_reason) == ((3, 3, 3), "stop")


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([((5, 6), (-0.5, 0.25), "stop")], "log-probability of 0.25"),
        ([((), (), "stop")], "without a token"),
        ([((5,), (-9999.0,), "stop")], "not finite"),
    ],
)
def test_what_no_trainer_could_use_is_refused(pieces, said):
    with pytest.raises(GenerationFailed, match=said):
        completion(*pieces)
