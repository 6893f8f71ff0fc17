"""Several callers at once, one batch: an asyncio program. Pass a model, or nothing for the default one."""

import asyncio
import sys

from holdfast import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Stream one answer; cancelling the task ends its request."""
    text = ""
    async for delta in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=24)):
        text += delta.text
    print(f"{name}: {prompt}{text}")


async def main() -> None:
    """Start several callers. The engine steps in its own thread; new requests join the next step."""
    async with AsyncLLM(model=sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        prompts = ["The sea is", "A page of memory is", "Once upon a time"]
        await asyncio.gather(*(ask(llm, f"caller {number}", prompt) for number, prompt in enumerate(prompts)))


if __name__ == "__main__":
    asyncio.run(main())
