"""generate() of transformers with a compressed KV cache. Pass a model folder or a .gguf file, or nothing for the default model."""

import sys

import torch

from holdfast.cli.bench_transformers import open_transformers
from holdfast.config import EngineConfig
from holdfast.engine.open_text import open_tokenizer
from holdfast.integrations.transformers import TurboQuantCache
from holdfast.loading.model_files import open_model

PROMPT = (
    "A lighthouse keeper writes in his diary every evening. Today he writes about the storm, the ships and the light:"
)


def main() -> None:
    """Any other model of transformers takes the cache in the same way: one argument of generate."""
    config = EngineConfig(model=sys.argv[1] if len(sys.argv) > 1 else None)
    opened = open_model(config.model, "auto")
    tokenizer = open_tokenizer(config, opened)
    model = open_transformers(opened, "float32", "cpu")
    opened.source.close()
    ids_NT = torch.tensor([tokenizer.encode(PROMPT)])
    cache = TurboQuantCache(model, format="turboquant_k8v4", tail=32)
    out_NT = model.generate(
        ids_NT, attention_mask=torch.ones_like(ids_NT), past_key_values=cache, max_new_tokens=64, do_sample=False
    )
    print(tokenizer.decode(out_NT[0].tolist()))
    memory = cache.memory_bytes()
    for plane, num_bytes in memory.planes.items():
        print(f"{plane:<8} {num_bytes / 1024:8.1f} KiB")
    print(f"{'tail':<8} {memory.tail / 1024:8.1f} KiB, the newest tokens as they came")
    print(f"{'spare':<8} {memory.spare / 1024:8.1f} KiB, room for tokens to come")


if __name__ == "__main__":
    main()
