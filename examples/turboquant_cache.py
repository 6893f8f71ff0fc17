"""generate() of transformers with a compressed KV cache. Pass a model folder or a Hub id, or nothing for SmolLM2-135M-Instruct."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import TurboQuantCache

PROMPT = (
    "A lighthouse keeper writes in his diary every evening. Today he writes about the storm, the ships and the light:"
)


def main() -> None:
    """Pass the cache to generate; this works for every model of transformers."""
    name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    cache = TurboQuantCache(model, format="turboquant_k8v4", tail=32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    out_NT = model.generate(**inputs, past_key_values=cache, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(out_NT[0]))
    memory = cache.memory_bytes()
    for plane, num_bytes in memory.planes.items():
        print(f"{plane:<8} {num_bytes / 1024:8.1f} KiB")
    print(f"{'tail':<8} {memory.tail / 1024:8.1f} KiB, the newest tokens as they came")
    print(f"{'spare':<8} {memory.spare / 1024:8.1f} KiB, room for tokens to come")


if __name__ == "__main__":
    main()
