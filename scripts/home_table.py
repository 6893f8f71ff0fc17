"""Table of `check_at_home.py`: each promise, its command, and the conditions on its output."""

from dataclasses import dataclass

WAY_IN, BY_NAME, GGUF, PLAN = "the way in", "models by name", "GGUF", "plan"
VLLM, QUALITY, CACHE, LAST = "vLLM scripts", "quality", "quantized cache", "last tracebacks"
PARAGRAPHS = (WAY_IN, BY_NAME, GGUF, PLAN, VLLM, QUALITY, CACHE, LAST)
MODEL, HUB, GPU, PYTEST = ("the default model",), ("huggingface_hub",), ("a GPU",), ("pytest",)


@dataclass(frozen=True)
class Check:
    """A promise and its check; a command shared by several checks runs once."""

    paragraph: str
    says: str
    command: str
    wants: tuple[str, ...] = ()
    """Regular expressions that the output must have."""
    refuses: tuple[str, ...] = ()
    """Regular expressions that the output must not have."""
    codes: tuple[int, ...] = (0,)
    number: tuple[str, float, float] | None = None
    """A regular expression whose group is a number, with its least and largest value."""
    seconds: float | None = None
    """Time limit on an idle machine."""
    needs: tuple[str, ...] = ()
    timeout: float = 60
    is_slow: bool = False
    """True if it imports torch; such checks come last."""
    is_shown: bool = False
    """True if it is one of the ten transcripts."""


VLLM_SCRIPT = """HOLDFAST_LOG_LEVEL=INFO python - <<'END'
import os, pickle
from pathlib import Path
from holdfast import LLM, SamplingParams

llm = LLM(model=Path("tiny"), dtype="float32", max_model_len=128, trust_remote_code=True, swap_space=4)

def refused(word, act):
    try:
        act()
    except Exception as error:
        print(f"{word}: {type(error).__name__}: {error}")

greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
print("tokenizer:", llm.get_tokenizer().encode("Hi")[-2:])
print("defaults:", type(llm.get_default_sampling_params()).__name__)
pair = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "allowed_token_ids": [67, 68]}  # a and b
print("bad words:", llm.generate("Hello", SamplingParams(**pair, bad_words=["a"]))[0].outputs[0].text)
print("and others:", llm.generate("Hello", SamplingParams(**pair, bad_words=["b"]))[0].outputs[0].text)
only = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, allowed_token_ids=[50, 51])
print("allowed:", set(llm.generate("Hello", only)[0].outputs[0].token_ids) <= {50, 51})
long = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5000, ignore_eos=True))[0].outputs[0]
print("cut:", len(long.token_ids) < 128, long.finish_reason)
message = [{"role": "user", "content": "a</s>b"}]
plain = llm.chat(message, greedy)[0]
allowed = llm.chat(message, greedy, allow_special_tokens=True)[0]
print("special:", len(plain.prompt_token_ids) - len(allowed.prompt_token_ids), 2 in allowed.prompt_token_ids)
refused("generate", lambda: llm.generate("Hello", sampling_param=greedy))
refused("chat", lambda: llm.chat(message, add_generation_promt=True))
refused("params", lambda: SamplingParams(max_token=5))
refused("pickle", lambda: pickle.dumps(llm))
END"""

CONFIG_SCRIPT = """python - <<'END'
from pathlib import Path
from holdfast.config import EngineConfig

taken = EngineConfig.from_options(dtype="half", kv_cache_dtype="fp8_e4m3", model=Path("tiny"))
print(taken.dtype, taken.kv_cache_dtype, taken.model)
EngineConfig.from_options(trust_remote_code=True, swap_space=4, data_parallel_size=1)
try:
    EngineConfig.from_options(data_parallel_size=2)
except Exception as error:
    print(error)
END"""

BLOCKS_SCRIPT = """python -m pytest -q -p no:cacheprovider "$ROOT/tests/loading/gguf/test_gguf_dequantize.py" """

OPEN = "from holdfast.loading.model_files import open_model"
FETCH = f'''with-hub python -c "{OPEN}
print('positions', open_model('org/tiny', 'auto').spec.max_position)
print('of v1', open_model('org/tiny', 'auto', revision='v1').spec.max_position)"'''
RESUME = f'''HUB_CUTS=1 with-hub python -c "{OPEN}
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 4096
print('layers', open_model('org/cut', 'auto').spec.num_layers)"'''
ROOM = f'''with-hub python -c "{OPEN}
from holdfast.loading.hub import download
download.shutil.disk_usage = lambda path: download.shutil._ntuple_diskusage(10**9, 10**9, 100_000)
try:
    open_model('org/room', 'auto')
except Exception as error:
    print(error)"'''
TAG = '''with-hub python -c "from holdfast.loading.locate import locate_model
print(locate_model('org/tiny-GGUF:q8_0').path.name)"'''
NO_NETWORK = f'''python -c "import socket, sys
sys.modules['huggingface_hub'] = None
socket.socket.connect = None
{OPEN}
print('layers', open_model('org/cached', 'auto').spec.num_layers)
print('torch' in sys.modules)"'''
COMPLETION = """eval "$(holdfast completion bash)"
COMP_WORDS=(holdfast plan --gpu h); COMP_CWORD=3; _holdfast; echo ${COMPREPLY[@]}"""
CHEAPEST = "at-80-columns holdfast plan Qwen3-32B --gpu rtx4090 --quantization mxfp4"
FIRST_RUN = "holdfast run -p 'Who wrote Hamlet?' --max-tokens 12"
TWICE = """for start in first second; do
  HOLDFAST_LOG_LEVEL=INFO holdfast run tiny --quantization int8 -p Hi --max-tokens 1 2>&1 | grep -i quantized
done
holdfast cache"""
STARTS = """python - <<'END'
import time
from holdfast import LLM

best = {}
for weight_cache in ("auto", "off", "auto", "off", "auto"):
    started = time.perf_counter()
    with LLM(quantization="SCHEME", device="DEVICE", weight_cache=weight_cache, max_model_len=128, max_num_seqs=1):
        seconds = time.perf_counter() - started
    best[weight_cache] = min(seconds, best.get(weight_cache, seconds))
print(f"from the cache {best['auto']:.2f} s, quantized anew {best['off']:.2f} s")
print(f"ratio {best['auto'] / best['off']:.3f}")
END"""
LIMIT = "holdfast run -p Hi --max-tokens 1 --memory-limit 640MiB"
QUANTIZED_PAGES = "holdfast run tiny -p Hello --kv-cache-dtype turboquant_4bit_nc --kv-near-tokens 0 --max-tokens 2"

WAY_IN_CHECKS = (
    Check(WAY_IN, "--version", "holdfast --version", (r"^holdfast \d+\.\d+",), seconds=1),
    Check(WAY_IN, "python -m holdfast", "python -m holdfast --version", (r"^holdfast \d+\.\d+",)),
    Check(
        WAY_IN,
        "README: install lines for a GPU, a CPU, a clone and a wheel, and none of a package that is not ours",
        'sed -n "/^## Install/,/^## On a GPU/p" "$ROOT/README.md"',
        ("a GPU machine", "without a GPU", r"dist/holdfast-\*\.whl"),
        (r"pip install holdfast\b",),
    ),
    Check(
        WAY_IN,
        "README: status near the top, a GPU quickstart, vLLM's words beside ours",
        'grep -n -e "^## " -e "^| vLLM" "$ROOT/README.md"',
        (r"^(\d|1\d):## Status", "## On a GPU", r"\| vLLM \| here"),
    ),
    Check(WAY_IN, "shell completion", COMPLETION, (r"\bh100\b.*\bh200\b",), is_shown=True),
    Check(
        WAY_IN,
        "completion for zsh and fish",
        "holdfast completion zsh; holdfast completion fish",
        ("bashcompinit", "complete -c holdfast"),
    ),
    Check(
        WAY_IN,
        "doctor: what is here, and what is missing for what",
        "holdfast doctor",
        ("torch", "(?i)CUDA", "(?i)triton", "(?i)compiler", "(?i)cache", "(?i)model"),
        is_slow=True,
        is_shown=True,
    ),
    Check(
        WAY_IN,
        "the first compile of CPU kernels says what it does",
        FIRST_RUN,
        (r"^Compiling CPU kernels, kept in ", "Shakespeare"),
        needs=MODEL,
        is_slow=True,
    ),
    Check(
        WAY_IN,
        "the first compile of GPU kernels says what it does",
        "TRITON_CACHE_DIR=$PWD/triton holdfast run tiny --device cuda -p Hi --max-tokens 1",
        ("Compiling GPU kernels",),
        needs=GPU,
        is_slow=True,
    ),
)

BY_NAME_CHECKS = (
    Check(
        BY_NAME,
        "a Hub id is found in the local cache without network and client, and without torch",
        NO_NETWORK,
        ("^layers 2$", "^False$"),
    ),
    Check(
        BY_NAME,
        "plan finds it there too",
        "holdfast plan org/cached --gpu h200",
        (r"cached on NVIDIA H200",),
        seconds=3,
    ),
    Check(
        BY_NAME,
        "where there is neither, one line says what to do",
        "holdfast run org/name -p x",
        (r"^error: .*org/name.*hf download org/name",),
        codes=(1,),
    ),
    Check(
        BY_NAME,
        "downloaded by the real client: a revision, and only the files that are needed",
        FETCH,
        ("^positions 256$", "^of v1 77$", "^fetched model-00003-of-00003.safetensors$"),
        ("pytorch_model", "README", "onnx"),
        needs=HUB,
        is_shown=True,
    ),
    Check(
        BY_NAME,
        "a connection that is cut is taken up where it ended",
        RESUME,
        ("^layers 2$", r"^fetched model-00002-of-00003.safetensors from bytes=[1-9]\d*-"),
        needs=HUB,
    ),
    Check(
        BY_NAME,
        "room on disk is checked before the first weight",
        ROOM,
        ("has room for 97.66 KiB; make room",),
        ("fetched .*safetensors$",),
        needs=HUB,
    ),
    Check(
        BY_NAME,
        "a GGUF repository with a quantization tag",
        TAG,
        ("^m-Q8_0-00001-of-00002.gguf$", "^fetched m-Q8_0-00002-of-00002.gguf$"),
        ("fetched m-Q4", "mmproj"),
        needs=HUB,
    ),
    Check(
        BY_NAME,
        "a download says what it fetches, and the model answers",
        "with-hub holdfast run org/run -p Hi --max-tokens 1",
        (r"^Downloading org/run: \d+ files, ", "^Loading run"),
        needs=HUB,
        is_slow=True,
    ),
    Check(
        BY_NAME,
        "config.json without architectures is read by model_type",
        "holdfast plan untyped --gpu h200",
        ("untyped on NVIDIA H200",),
    ),
    Check(
        BY_NAME,
        "a wrong path fails in under a second",
        "time holdfast run /no/such/path -p x",
        (r"^error: .*'/no/such/path'",),
        number=(r"^real\s+0m([\d.]+)s", 0, 1.0),
        codes=(1,),
        is_shown=True,
    ),
    Check(
        BY_NAME,
        "nothing heavy is imported before the headers are open",
        "python -X importtime -m holdfast run /no/such/path -p x",
        ("there is no such file or folder",),
        (r"\|\s+(torch|numpy|rich|tokenizers)$",),
        codes=(1,),
    ),
)

GGUF_CHECKS = (
    Check(
        GGUF,
        "plan: bytes on disk, stored types, bytes in memory and why",
        "at-80-columns holdfast plan --gpu h200",
        (
            r"^on disk +93\.81 MiB: 210 Q4_1, 61 F32, 1 Q8_0",
            r"^in memory +92\.04 MiB: 121 of 121 packed weights stay as stored",
        ),
        needs=MODEL,
        is_shown=True,
    ),
    Check(
        GGUF,
        "run: the same",
        FIRST_RUN,
        (r"^on disk +93\.81 MiB: 210 Q4_1", r"^in memory +92\.10 MiB: 121 of 121 packed weights stay as stored"),
        needs=MODEL,
        is_slow=True,
    ),
    Check(
        GGUF,
        "the refusal: the same",
        LIMIT,
        (r"its 93\.81 MiB on disk are 513\.13 MiB in memory, since blocks are expanded",),
        codes=(1,),
        needs=MODEL,
        is_slow=True,
    ),
    Check(
        GGUF,
        "with --quantization the embedding of a quantized file is quantized too",
        "holdfast plan untied.gguf --gpu rtx4090 --quantization int8",
        (r"^in memory +156\.29 MiB", r"quantized_embeddings +all +the file stores the embedding as Q8_0"),
        needs=MODEL,
    ),
    Check(
        GGUF,
        "a file in two parts opens and answers",
        "holdfast run parts -p 'Who wrote Hamlet?' --max-tokens 8",
        ("Bard", r"^on disk +93\.81 MiB in 2 files"),
        needs=MODEL,
        is_slow=True,
    ),
    Check(GGUF, "no message says to merge parts", 'grep -rni "gguf-split.*merge" "$ROOT/src"', codes=(1,)),
    Check(
        GGUF,
        "Q2_K, Q3_K, IQ4_NL, IQ4_XS and MXFP4 are those of the gguf package",
        BLOCKS_SCRIPT,
        (r"\d+ passed",),
        needs=PYTEST,
        is_slow=True,
    ),
)

PLAN_CHECKS = (
    Check(
        PLAN,
        "the answer first, then the best command, then what else would fit",
        "at-80-columns holdfast plan Qwen3-32B --gpu rtx4090",
        (
            r"\A(?:\x1b\[[0-9;]*m)*NO: 42\.17 GiB short on rtx4090",
            r"(?s)what fits best.*17,456 tokens.*holdfast serve Qwen/Qwen3-32B --quantization mxfp4",
            "(?s)changes answers a little.*more of this GPU.*another GPU",
        ),
        codes=(1,),
        is_shown=True,
    ),
    Check(
        PLAN,
        "levers that cost no quality first, then formats, then GPUs",
        CHEAPEST,
        (r"^YES: 5,088 tokens", "(?s)costs no quality.*17,456.*changes answers a little.*another GPU"),
    ),
    Check(
        PLAN,
        "the command that is advised does what it says",
        f"{CHEAPEST} --memory-utilization 0.98 --max-num-batched-tokens 2048 --max-num-seqs 4",
        ("KV cache size: 17,456 tokens",),
    ),
    Check(
        PLAN,
        "a GPU below compute capability 8.0 is marked, and none is advised",
        "holdfast plan Qwen3-8B --gpu v100",
        (r"^CANNOT START: ", r"does not run: needs compute capability 8\.0", r"take \w+"),
        (r"take (v100|t4|p100|rtx20)",),
        codes=(3,),
    ),
    Check(
        PLAN,
        "a refusal is the table with the smallest changes, --quantization among them",
        f"at-80-columns {LIMIT}",
        ("(?s)weights.*kv pages", "int8"),
        codes=(1,),
        needs=MODEL,
        is_slow=True,
        is_shown=True,
    ),
    Check(
        PLAN,
        "a limit that shortens the context says so",
        "holdfast plan Llama-3.1-8B --gpu rtx4090",
        (r"shortened from the model's own 131,072: no more fits",),
    ),
    Check(
        PLAN,
        "memory_limit counts what Python and torch hold, as an owner",
        FIRST_RUN,
        (r"^python and torch +\d+\.\d\d MiB",),
        needs=MODEL,
        is_slow=True,
    ),
    Check(
        PLAN,
        "names as people type them: GPUs",
        "for gpu in 4090 2x4090 H100-PCIe 'rtx 4090' A100_40GB; do holdfast plan Qwen3-8B --gpu \"$gpu\" | head -2; done",
        ("on NVIDIA GeForce RTX 4090", "on each of 2 x NVIDIA GeForce RTX 4090", "on NVIDIA H100 PCIe", "A100"),
        ("^error",),
    ),
    Check(
        PLAN,
        "names as people type them: models",
        "for model in llama2-7b Llama-3.3-70B qwen3-4b-instruct-2507 gpt-oss:20b gemma-3-27b mixtral-8x7b phi-4 "
        'kimi-k2 deepseek-v3; do holdfast plan "$model" --gpu b200 2>&1 | head -2; done',
        ("(?i)llama-2-7b", "(?i)gpt-oss-20b", "(?i)mixtral", "(?i)kimi"),
        ("^error: model",),
    ),
    Check(
        PLAN,
        "forty models, marked where only planned, and thirty GPUs",
        "holdfast plan --list",
        (r"\*", "(?i)planned only"),
        number=(r"(\d+) models by name", 40, 1000),
    ),
    Check(
        PLAN,
        "sources of both",
        'holdfast plan --list --json | python -c "import json, sys; lists = json.load(sys.stdin)\n'
        "print(len(lists['models']), len(lists['gpus']), all(one['source'] for one in lists['models'] + lists['gpus']))\"",
        (r"True$",),
        number=(r"^\d+ (\d+) ", 30, 1000),
    ),
    Check(
        PLAN,
        "at 80 columns nothing is cut",
        "at-80-columns holdfast plan Qwen3-8B --gpu rtx4090 --sweep",
        ("Qwen3-8B on",),
        (r"…", r"^(?:\x1b\[[0-9;]*m)*[^\n\x1b]{81}"),
    ),
)

VLLM_CHECKS = (
    Check(VLLM, "aliases: half, fp8_e4m3, Path", CONFIG_SCRIPT, (r"^float16 fp8 tiny$",), is_slow=True),
    Check(
        VLLM,
        "options that are no-ops are taken with one log line",
        CONFIG_SCRIPT,
        (r"taken without effect here: trust_remote_code=True .*swap_space=4 .*data_parallel_size=1",),
        is_slow=True,
        is_shown=True,
    ),
    Check(
        VLLM,
        "known options that are missing say so, and what to do",
        "holdfast run --data-parallel-size 2 -p x",
        (r"^error: .*--data-parallel-size",),
        codes=(2,),
    ),
    Check(
        VLLM,
        "get_tokenizer, get_default_sampling_params",
        VLLM_SCRIPT,
        (r"^tokenizer: \[", "^defaults: SamplingParams"),
        is_slow=True,
    ),
    Check(
        VLLM,
        "SamplingParams, generate and chat suggest the nearest name",
        VLLM_SCRIPT,
        (
            r"^params: .*did you mean max_tokens",
            r"^generate: .*did you mean sampling_params",
            r"^chat: .*did you mean add_generation_prompt",
        ),
        is_slow=True,
    ),
    Check(
        VLLM,
        "bad_words, allowed_token_ids",
        VLLM_SCRIPT,
        ("^bad words: bbbb", "^and others: aaaa", "^allowed: True"),
        is_slow=True,
    ),
    Check(
        VLLM,
        "max_tokens beyond the room is cut and ends with length",
        VLLM_SCRIPT,
        ("^cut: True length",),
        is_slow=True,
    ),
    Check(
        VLLM,
        "the default of max_tokens stands in --help and in README",
        'holdfast run --help; grep -F "max_tokens" "$ROOT/README.md"',
        (r"512 in run, 1024", r"`max_tokens` \(16\) \| no bound"),
    ),
    Check(VLLM, "HOLDFAST_LOG_LEVEL works in scripts", VLLM_SCRIPT, (r"^INFO [\d:]+ holdfast",), is_slow=True),
    Check(
        VLLM,
        "bars in notebooks",
        'python -m pytest -q -p no:cacheprovider "$ROOT/tests/api" -k notebook',
        (r"\d+ passed",),
        needs=PYTEST,
        is_slow=True,
    ),
    Check(VLLM, "special tokens inside messages are text", VLLM_SCRIPT, (r"^special: [1-9]\d* True",), is_slow=True),
    Check(
        VLLM,
        "pickle.dumps(llm) is one sentence",
        VLLM_SCRIPT,
        (r"^pickle: TransferError: an LLM was to be pickled.*send prompts",),
        is_slow=True,
    ),
)

QUALITY_CHECKS = (
    Check(
        QUALITY,
        "run says which layers are protected, why, and that quality changes",
        QUANTIZED_PAGES,
        (r"KV cache in turboquant_4bit_nc; layers? .* protected in fp8 .*answers can differ",),
        is_slow=True,
        is_shown=True,
    ),
    Check(
        QUALITY,
        "key biases and key means: used, in the plan, neutral for attention",
        'python -m pytest -q -p no:cacheprovider "$ROOT/tests/kernels/attention/test_key_bias.py" "$ROOT/tests/runner/test_centred_keys.py"',
        (r"\d+ passed",),
        needs=PYTEST,
        is_slow=True,
    ),
    Check(
        QUALITY,
        "TurboQuantCache chooses protected layers by key bias as the engine does",
        'python -m pytest -q -p no:cacheprovider "$ROOT/tests/integrations/test_transformers.py" -k "bias or protected"',
        (r"\d+ passed",),
        needs=(*PYTEST, "transformers"),
        is_slow=True,
    ),
    Check(
        QUALITY,
        "bytes of key means are in the plan",
        QUANTIZED_PAGES,
        (r"^attention +\d+",),
        is_slow=True,
    ),
)

CACHE_CHECKS = (
    Check(
        CACHE,
        "a second start takes what the first one kept",
        TWICE,
        ("quantized weights of an earlier start are read from", "int8, float32  of model.safetensors"),
        is_slow=True,
    ),
    Check(
        CACHE,
        "a start from it is no slower than quantizing anew",
        STARTS.replace("SCHEME", "int8").replace("DEVICE", "cpu"),
        number=(r"^ratio ([\d.]+)", 0, 1.1),
        needs=MODEL,
        is_slow=True,
    ),
    Check(
        CACHE,
        "a start from it is no slower than quantizing anew, on a GPU",
        STARTS.replace("SCHEME", "fp8").replace("DEVICE", "cuda"),
        number=(r"^ratio ([\d.]+)", 0, 1.1),
        needs=(*MODEL, *GPU),
        is_slow=True,
    ),
)

LAST_CHECKS = (
    Check(
        LAST,
        "stdin closed in chat",
        "holdfast chat tiny <&-",
        (r"\Aerror: .*standard input.*\n\Z",),
        codes=(2,),
    ),
    Check(
        LAST,
        "ASCII-only output of a plan",
        "PYTHONIOENCODING=ascii LC_ALL=C holdfast plan Qwen3-8B --gpu h200 --sweep",
        ("###",),
        (r"[^\x00-\x7f]",),
    ),
    Check(
        LAST,
        "ASCII-only output, and /undo with emoji in it",
        "printf 'h\\360\\237\\230\\200\\n/undo\\n' | PYTHONIOENCODING=ascii LC_ALL=C holdfast chat tiny --max-tokens 3",
        (r"taken back: 'h\\U0001f600'",),
        (r"[^\x00-\x7f]",),
        is_slow=True,
    ),
    Check(
        LAST,
        "/undo with emoji",
        "printf 'h\\360\\237\\230\\200\\n/undo\\n' | holdfast chat tiny --max-tokens 3",
        ("taken back: 'h😀'",),
        is_slow=True,
    ),
    Check(
        LAST,
        "ulimit -v",
        "ulimit -v 300000; holdfast run tiny -q -p hi",
        (r"\Aerror: .*292 MiB \(ulimit -v\).*\n\Z",),
        codes=(1,),
        is_slow=True,
        is_shown=True,
    ),
    Check(
        LAST,
        "ulimit -n 12",
        "ulimit -n 12; holdfast run tiny -q -p hi --max-tokens 1 2>&1 | tail -1",
        codes=(0, 1),
        is_slow=True,
    ),
)

CHECKS = (
    *WAY_IN_CHECKS,
    *BY_NAME_CHECKS,
    *GGUF_CHECKS,
    *PLAN_CHECKS,
    *VLLM_CHECKS,
    *QUALITY_CHECKS,
    *CACHE_CHECKS,
    *LAST_CHECKS,
)
