"""An agent that knows nothing of farflow: it asks, looks at the answer, and may ask again.

It speaks the OpenAI API to wherever the environment says. What makes it trainable is at the end: it
posts a reward. Without that, the run's verifier would score its last answer.
"""

import json
import os

import openai

TRIES = 2


def main() -> None:
    """Up to ``TRIES`` answers to the question in ``FARFLOW_ITEM``."""
    item = json.loads(os.environ["FARFLOW_ITEM"])
    reward = 0.0
    with openai.OpenAI() as client:  # OPENAI_BASE_URL and OPENAI_API_KEY are set
        model = next(iter(client.models.list())).id
        messages = [{"role": "user", "content": item["prompt"]}]
        for attempt in range(TRIES):
            answer = client.chat.completions.create(model=model, messages=messages)
            said = answer.choices[0].message
            if (said.content or "").split() == item["answer"].split():
                reward = 1.0 / (1 + attempt)
                break
            # The message goes back as it came, so the conversation stays one sequence.
            again = f"That is not right. Try again: {item['prompt']}"
            messages += [said, {"role": "user", "content": again}]
        client.post("/farflow/reward", cast_to=object, body={"reward": reward})


if __name__ == "__main__":
    main()
