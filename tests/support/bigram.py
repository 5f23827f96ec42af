"""A language model of one table, so that every derivative can be written down."""

import math
from types import SimpleNamespace

from cloud_trainer.batching import make_batch
from cloud_trainer.critic import add_critic
from cloud_trainer.spread import OneProcess
from cloud_trainer.torch_gradients import accumulate
from cloud_trainer.torch_learner import Learner

VOCABULARY = 6


def bigram(table):
    """A torch module with the log-odds ``table[before][token]``; its hidden state is the last
    token, one-hot."""
    import torch

    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32))

        def forward(self, hidden):
            return hidden @ self.weight

    class Bigram(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.output = Output()

        def get_output_embeddings(self):
            return self.output

        def forward(self, input_ids, use_cache):
            assert use_cache is False
            hidden = torch.nn.functional.one_hot(input_ids, VOCABULARY).float()
            return SimpleNamespace(logits=self.output(hidden))

    return Bigram()


def learner_of(table, settings, reference=None):
    import torch

    torch.set_num_threads(1)
    model = bigram(table)
    spread = OneProcess("cpu")
    return Learner(
        model=model,
        weights=None,
        trained={"table": model.output.weight},
        optimizer=None,
        vocabulary=VOCABULARY,
        keeps_logits=False,
        artefacts={},
        spread=spread,
        reference=None if reference is None else bigram(reference).requires_grad_(False),
        critic=add_critic(model, settings, spread),
    )


def gradient_of(groups, settings, table, reference=None):
    """The gradient by the table, as nested lists, and the metrics."""
    gradient, _, facts = gradients_of(groups, settings, table, reference)
    return gradient, facts


def gradients_of(groups, settings, table, reference=None, head=None):
    """The gradients by the table and by the critic's ``head`` (a value per last token, and an
    offset), as nested lists, and the metrics."""
    import torch

    learner = learner_of(table, settings, reference)
    if head is not None:
        with torch.no_grad():
            learner.critic.head.weight.copy_(torch.tensor([head[0]]))
            learner.critic.head.bias.copy_(torch.tensor([head[1]]))
    batch = make_batch(groups, settings, vocabulary=VOCABULARY)
    facts = accumulate(learner, batch, settings, device="cpu")
    parameters = [learner.trained["table"]]
    if learner.critic is not None:
        parameters += learner.critic.head.parameters()
    found = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).tolist()
        for parameter in parameters
    ]
    return found[0], found[1:], facts


def log_probabilities(table, before, temperature=1.0):
    """Of every token behind ``before``."""
    scaled = [value / temperature for value in table[before]]
    top = max(scaled)
    total = top + math.log(math.fsum(math.exp(value - top) for value in scaled))
    return [value - total for value in scaled]
