"""Complete a few prompts at once. Pass a model folder or a .gguf file, or nothing for the default model."""

import sys

from holdfast import LLM, SamplingParams


def main() -> None:
    """Prompts in, texts out, in the same order."""
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None)
    prompts = ["The capital of France is", "Water boils at", "def fibonacci(n):"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
