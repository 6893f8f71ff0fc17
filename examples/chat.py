"""A conversation of several turns. Pass a model folder or a .gguf file, or nothing for the default model."""

import sys

from holdfast import LLM, SamplingParams


def main() -> None:
    """Keep the history in a list of messages; the prefix cache keeps the KV of earlier turns."""
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    for question in ["Who wrote Hamlet?", "And Faust?"]:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(f"> {question}\n{output.outputs[0].text}  ({output.num_cached_tokens} prompt tokens cached)")


if __name__ == "__main__":
    main()
