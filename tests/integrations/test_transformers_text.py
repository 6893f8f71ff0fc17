"""TurboQuantCache on the default model: the same greedy text as with full-precision keys and values.

The model is small, and where it writes freely its best two tokens are often nearly alike: of ten stories, summaries and
explanations, keys and values rounded to bfloat16 already change 2, and k8v4 with a tail of 64 changes 7. So these tasks
have an answer.
"""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from holdfast.cli.bench_transformers import open_transformers
from holdfast.integrations.transformers import TurboQuantCache
from holdfast.loading.model_files import open_model
from holdfast.text.chat_template import ChatTemplate, chat_template_from_gguf
from holdfast.text.gguf_tokenizer import tokenizer_from_gguf
from holdfast.text.tokenizer import Tokenizer

HARBOUR = (
    "The harbour of Lindvik freezes every winter, and for three hundred years nobody could leave it between December and "
    "March. In 1891 the town bought a steam icebreaker, the Hedvig, for 214,000 crowns. It was paid for by a tax on salted "
    "fish, which the fishermen hated until the first January in which they could sail. The Hedvig served for 46 years. Her "
    "last captain, Anna Lund, kept a diary in which she noted the thickness of the ice each morning; the institute in the "
    "capital still uses it, since no other record of that coast is as long. Today the ship lies beside the old fish hall "
    "and is a museum. Children may ring her bell, and on the first of March every year the whole town eats salted fish."
)
MEMO = (
    "To: all staff. From: the office manager. Subject: the lift. The lift in the north building will be out of service from "
    "Monday the 4th to Friday the 15th, because its cables are being replaced. Deliveries must use the south building, where "
    "the loading dock is open from 7:30 to 16:00. Anyone who cannot use the stairs should write to Petra Holm before Friday, "
    "so that a room on the ground floor can be arranged. The canteen on the fourth floor stays open, but it will serve "
    "cold food only, since the trolleys cannot be brought up. Meetings with visitors should be moved to the south building."
)
TABLE = "Write the multiplication table of 7, from 7 x 1 to 7 x 12, one line each."
FACTORIAL = "Write a Python function that returns the factorial of a number."
PROMPTS = (
    f"Repeat this text word for word.\n\n{HARBOUR}",
    "Write the numbers from 1 to 40, separated by commas.",
    TABLE,
    "List the twelve months of the year, each with its number of days, one line each.",
    FACTORIAL,
    "Write a minimal HTML page with a heading, a paragraph and a list of three fruits.",
    "Copy this list of words in the same order: apple, river, window, copper, garden, seven, thunder, pillow, market, "
    "orange, bridge, candle, forest, silver, kitchen, hammer, island, purple, engine, blanket.",
    "Name the capital of each of these countries, one line each: France, Italy, Spain, Germany, Poland, Portugal, Greece, "
    "Austria, Norway, Sweden.",
    'Continue this JSON up to id 12: [{"id": 1, "name": "item1"}, {"id": 2, "name": "item2"}, {"id": 3, "name": "item3"},',
    f"Repeat this memo word for word.\n\n{MEMO}",
)


class Talker(NamedTuple):
    """The default model in transformers, and its own words for prompts."""

    model: Any
    tokenizer: Tokenizer
    template: ChatTemplate

    def answer(self, prompt: str, cache: Any, num_new: int) -> str:
        """Greedy text of so many tokens, wherever the model would end."""
        text = self.template.render([{"role": "user", "content": prompt}])
        ids_NT = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=num_new, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            out_NT = self.model.generate(
                ids_NT,
                attention_mask=torch.ones_like(ids_NT),
                past_key_values=cache,
                generation_config=settings,
            )
        return self.tokenizer.decode(out_NT[0, ids_NT.shape[1] :].tolist(), skip_special_tokens=False)

    def is_equal(self, prompt: str, cache: TurboQuantCache, num_new: int) -> bool:
        """Whether the cache changes nothing."""
        exact = self.answer(prompt, DynamicCache(config=self.model.config), num_new)
        return self.answer(prompt, cache, num_new) == exact


@pytest.fixture(scope="module")
def talker() -> Talker:
    """SmolLM2-135M-Instruct, from the package that the default model is."""
    opened = open_model(None, "auto")
    assert opened.gguf is not None, "the default model is a GGUF file"
    model = open_transformers(opened, "float32", "cpu").eval()
    opened.source.close()
    template = chat_template_from_gguf(opened.gguf.metadata, opened.path.name)
    assert template is not None, "the default model has a chat template"
    return Talker(model, tokenizer_from_gguf(opened.gguf.metadata, opened.path.name), template)


@pytest.mark.parametrize(
    "prompt", [pytest.param(TABLE, id="table", marks=pytest.mark.slow), pytest.param(FACTORIAL, id="factorial")]
)
def test_the_same_text_with_a_short_tail(talker: Talker, prompt: str) -> None:
    cache = TurboQuantCache(talker.model.config, "turboquant_k8v4", tail=32)
    assert talker.is_equal(prompt, cache, num_new=32)
    memory = cache.memory_bytes()
    num_coded = memory.planes["k_scale"] // (2 * 3 * 30)
    assert num_coded >= 32
    assert sum(memory.planes.values()) == num_coded * 30 * 3 * (64 + 2 + 32 + 2)


@pytest.mark.slow
def test_the_same_text_on_eight_of_ten(talker: Talker) -> None:
    caches = {prompt: TurboQuantCache(talker.model.config) for prompt in PROMPTS}
    equal = [prompt for prompt, cache in caches.items() if talker.is_equal(prompt, cache, num_new=64)]
    assert len(equal) >= 8, f"other text for {[prompt[:40] for prompt in PROMPTS if prompt not in equal]}"
    assert all(sum(cache.memory_bytes().planes.values()) for cache in caches.values()), "some had nothing to code"
