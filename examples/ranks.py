"""One model on several ranks, and the same tokens from one. Pass a model folder and how many (2), or nothing: the default model on 3.

Without a GPU ranks are processes on the CPU: slower than one rank, but enough to try the options.
"""

import sys

from holdfast import LLM, SamplingParams

PROMPT = "The three primary colours are"


def main() -> None:
    """Compare tokens. `exact` does not depend on the number of ranks. `reduce`, the default, is faster and rounds sums in another order."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    num_ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 3 if model is None else 2
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for size, sums in ((1, "auto"), (num_ranks, "reduce"), (num_ranks, "exact")):
        llm = LLM(model=model, tensor_parallel_size=size, tensor_parallel_sums=sums, max_model_len=256)
        held = next(row.planned_bytes for row in llm.memory.rows if row.owner == "weights")
        text = llm.generate([PROMPT], params)[0].outputs[0].text
        print(f"{size} ranks, {sums:<6} {held / 2**20:8.1f} MiB of weights each -> {text!r}")
        llm.shutdown()


if __name__ == "__main__":
    main()
