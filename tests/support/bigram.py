"""A language model of one table, so that every derivative can be written down."""

import math
from types import SimpleNamespace

from cloud_trainer.batching import make_batch
from cloud_trainer.spread import OneProcess
from cloud_trainer.torch_gradients import accumulate
from cloud_trainer.torch_learner import Learner

VOCABULARY = 6


def bigram(table):
    """A torch module with the log-odds ``table[before][token]``."""
    import torch

    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32))

        def forward(self, input_ids, use_cache):
            assert use_cache is False
            return SimpleNamespace(logits=self.table[input_ids])

    return Bigram()


def learner_of(table, reference=None):
    import torch

    torch.set_num_threads(1)
    model = bigram(table)
    return Learner(
        model=model,
        weights=None,
        trained={"table": model.table},
        optimizer=None,
        vocabulary=VOCABULARY,
        keeps_logits=False,
        artefacts={},
        spread=OneProcess("cpu"),
        reference=None if reference is None else bigram(reference).requires_grad_(False),
    )


def gradient_of(groups, settings, table, reference=None):
    """The gradient by the table, as nested lists, and the metrics."""
    learner = learner_of(table, reference)
    batch = make_batch(groups, settings, vocabulary=VOCABULARY)
    facts = accumulate(learner, batch, settings, device="cpu")
    gradient = learner.model.table.grad
    if gradient is None:
        return [[0.0] * VOCABULARY for _ in range(VOCABULARY)], facts
    return gradient.tolist(), facts


def log_probabilities(table, before, temperature=1.0):
    """Of every token behind ``before``."""
    scaled = [value / temperature for value in table[before]]
    top = max(scaled)
    total = top + math.log(math.fsum(math.exp(value - top) for value in scaled))
    return [value - total for value in scaled]
