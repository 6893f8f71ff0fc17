"""Log-probabilities of an answer, and the perplexity of a text. Pass a model, or nothing for the default one."""

import math
import sys

from holdfast import LLM, SamplingParams


def main() -> None:
    """Print the answer's log-probabilities with the runners-up, and the perplexity of a prompt."""
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate("The capital of France is", params)
    answer = output.outputs[0]
    for token_id, position in zip(answer.token_ids, answer.logprobs or [], strict=True):
        others = [f"{item.decoded_token!r} {math.exp(item.logprob):.2f}" for item in position.values()]
        print(f"{position[token_id].decoded_token!r:>12}  among {', '.join(others)}")
    scores = [
        position[token_id].logprob
        for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        if position is not None
    ]
    print(f"perplexity of the prompt: {math.exp(-sum(scores) / len(scores)):.1f}")


if __name__ == "__main__":
    main()
