"""Compare 8-bit weights, quantized during the load, with the original model. Pass a model folder or a .gguf file, or nothing for the default model."""

import sys

from holdfast import LLM, SamplingParams

PROMPT = "The three primary colours are"


def main() -> None:
    """Run both in turn: each frees its memory before the next one starts."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for scheme in (None, "fp8", "int8"):
        llm = LLM(model=model, quantization=scheme, weight_cache="off", max_model_len=256)
        held = next(row.planned_bytes for row in llm.memory.rows if row.owner == "weights")
        text = llm.generate([PROMPT], params)[0].outputs[0].text
        print(f"{scheme or 'as stored':<10} {held / 2**20:8.1f} MiB of weights -> {text!r}")
        llm.shutdown()


if __name__ == "__main__":
    main()
