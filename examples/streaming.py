"""Stream an answer, then print the memory by owner. Pass a model, or nothing for the default one."""

import sys

from holdfast import LLM, SamplingParams


def main() -> None:
    """Leaving the loop early would end the request."""
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=1)
    messages = [{"role": "user", "content": "Name three colours."}]
    for delta in llm.stream_chat(messages, SamplingParams(temperature=0.0, max_tokens=48)):
        print(delta.text, end="", flush=True)
    print()
    for row in llm.memory.rows:
        print(f"{row.owner:<12} {row.planned_bytes / 2**20:8.2f} MiB  {row.reason}")


if __name__ == "__main__":
    main()
